"""Sessions of ONNX Runtime: opening one, and what its graph takes and returns."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.optional import require

Source = str | os.PathLike[str] | bytes
TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int8)": torch.int8,
    "tensor(int16)": torch.int16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(uint8)": torch.uint8,
    "tensor(uint16)": torch.uint16,
    "tensor(uint32)": torch.uint32,
    "tensor(uint64)": torch.uint64,
    "tensor(bool)": torch.bool,
}
DYNAMIC = b"DynamicQuantize"  # operators that take their scale from all rows of a batch
EXPORT = 'torch.onnx.export(..., dynamic_axes={"input": {0: "batch"}}) or dynamic_shapes='


class OnnxError(FlopsError, RuntimeError):
    """A model that ONNX Runtime cannot load or run, or inputs that do not fit it."""


@dataclass(frozen=True)
class Slot:
    """An input or an output of a graph.

    Attributes:
        name: Its name.
        shape: Declared sizes; a dynamic axis is a name, or None without one.
        kind: Its type in ONNX Runtime's words, such as "tensor(float)".
    """

    name: str
    shape: tuple[int | str | None, ...]
    kind: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of its values; None if torch has none."""
        return TYPES.get(self.kind)

    @property
    def rows(self) -> int | str | None:
        """Declared size of the first axis, the batch; None if it has no name, or no axes."""
        return self.shape[0] if self.shape else None

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        kind = self.kind.removeprefix("tensor(").removesuffix(")")
        return f"{self.name}: {kind}[{sizes}]"

    def convert(self, given: Any) -> Tensor:
        """The tensor on the CPU, in the declared type, after its shape was checked.

        Raises:
            OnnxError: It is not a tensor, does not fit, or would be rounded to integers.
        """
        if not isinstance(given, Tensor):
            raise OnnxError(f"input '{self.name}' must be a tensor, not {type(given).__name__}")
        sizes = tuple(given.shape)
        fits = len(sizes) == len(self.shape) and all(
            not isinstance(want, int) or want == size
            for want, size in list(zip(self.shape, sizes, strict=True))[1:]
        )
        if not fits:
            raise OnnxError(
                f"input '{self.name}' has shape {sizes}, but the graph takes {self}; sizes other "
                f"than the batch are fixed by the export: reshape the input, or export the model "
                f"with this axis dynamic: {EXPORT}"
            )
        assert self.dtype is not None
        if given.is_floating_point() and not self.dtype.is_floating_point:
            raise OnnxError(
                f"input '{self.name}' takes {self.dtype}, got {given.dtype}: noise or values would "
                "be rounded away; convert it yourself if that is meant"
            )
        return given.detach().to("cpu", self.dtype).contiguous()


def slots(found: Sequence[Any]) -> tuple[Slot, ...]:
    """Inputs or outputs of a session."""
    return tuple(Slot(x.name, tuple(x.shape), x.type) for x in found)


def batched(inputs: Sequence[Slot]) -> tuple[Slot, ...]:
    """Inputs whose first axis is the batch.

    The batch is the first axis that is dynamic, or that of the first input if none is.
    """
    some = [slot for slot in inputs if slot.shape]
    first = next((x for x in some if not isinstance(x.rows, int)), some[0] if some else None)
    return tuple(x for x in some if first is not None and x.rows == first.rows)


def open_session(
    source: Source,
    threads: int | None,
    providers: Sequence[Any] | None,
    options: Any,
) -> Any:
    """An inference session of a file or of its bytes.

    Raises:
        MissingPackageError: onnxruntime is not installed.
        FileNotFoundError: There is no such file.
        OnnxError: It is not a model that ONNX Runtime can load, or a provider is not available.
    """
    onnxruntime = require("onnxruntime", "onnx")
    if not isinstance(source, bytes):
        path = Path(source)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"'{path}' {what}; give the path of an .onnx or .ort file")
        source = str(path)
    names = [p if isinstance(p, str) else p[0] for p in providers or ()]
    available = onnxruntime.get_available_providers()
    unknown = [name for name in names if name not in available]
    if unknown:  # ONNX Runtime would run without it
        raise OnnxError(
            f"this build of onnxruntime has no {', '.join(unknown)}; available: "
            f"{', '.join(available)}"
        )
    if options is None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.inter_op_num_threads = 1
    elif threads is not None:
        raise ValueError("give threads or options, not both: set options.intra_op_num_threads")
    try:
        return onnxruntime.InferenceSession(
            source, options, providers=list(providers or ["CPUExecutionProvider"])
        )
    except Exception as error:  # its errors have no common class
        given = f"{len(source)} bytes" if isinstance(source, bytes) else f"'{source}'"
        raise OnnxError(
            f"ONNX Runtime cannot load {given}: {_said(error)}. Is it a whole ONNX file (with its "
            ".data files beside it), of an operator set that onnxruntime "
            f"{onnxruntime.__version__} knows?"
        ) from error


def run_session(session: Any, names: Sequence[str], feed: dict[str, Any]) -> list[Any]:
    """The outputs, as numpy arrays.

    Raises:
        OnnxError: With the shapes that were given.
    """
    try:
        found: list[Any] = session.run(list(names), feed)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in feed.items())
        raise OnnxError(
            f"ONNX Runtime failed with inputs {shapes}: {_said(error)}. If the message is about "
            "shapes, the export has fixed a size that its inputs declare as dynamic: export again "
            "with that axis dynamic, or give OnnxModule(..., batch=) the size of the example"
        ) from error
    return found


def mixes_rows(source: Source | None) -> bool:
    """Whether a model quantises activations dynamically, with one scale for a whole batch.

    The names of operators are in the file as they are, so nothing needs to be parsed.
    """
    if source is None:
        return False
    if isinstance(source, bytes):
        return DYNAMIC in source
    with (
        open(source, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(DYNAMIC) >= 0


def source_of(session: Any) -> Source | None:
    """The file or the bytes that a session was made from, where it remembers them."""
    path, content = (getattr(session, name, None) for name in ("_model_path", "_model_bytes"))
    if isinstance(content, bytes) and content:
        return content
    return path if isinstance(path, str) and Path(path).is_file() else None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())
