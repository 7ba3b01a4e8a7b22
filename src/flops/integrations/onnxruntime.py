"""ONNX Runtime: a frozen model in an inference session, as a module of a larger model.

    x -> adapter -> session -> head -> loss

The session may be float, int8 or anything else that ONNX Runtime runs; it has no backward pass and
no parameters. Likelihood ratio needs none: noise on the adapter's output goes through the session
to the loss, and the adapter gets its gradient by a local VJP of its own.

An int8 session is a staircase: below the width of a step most differences are zero or a whole step.
`LikelihoodRatio("auto")`, the default, finds a sigma above it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flops.integrations.no_backward import without_backward
from flops.integrations.onnx_session import (
    EXPORT,
    OnnxError,
    Source,
    batched,
    mixes_rows,
    open_session,
    run_session,
    slots,
    source_of,
)

__all__ = ["OnnxError", "OnnxModule"]


class OnnxModule(nn.Module):
    """An inference session of ONNX Runtime as a frozen module.

    Call it with tensors in the order of the graph's inputs, or by name. They are converted to the
    types of the graph (floats never to integers) and moved to the CPU; outputs come back on the
    device and, if floating, in the type of the first floating input.

    It has no parameters and an empty `state_dict`: save the .onnx file beside the checkpoint.
    Copies share the session, which is immutable. A pickle holds the absolute path or the bytes, and
    opens the session again; a module that was made from a session cannot be pickled. Backward and
    forward-mode differentiation through it raise `BackwardError`.

    Args:
        model: Path of an .onnx or .ort file, its bytes, or an `onnxruntime.InferenceSession`.
        outputs: A name, for a tensor; names, for a dict by name. None is a tensor if the graph has
            one output, else a dict of all.
        batch: Rows per run of the session: more are split, and the last run is padded with copies
            of the last row. None is the graph's own batch if fixed, 1 if the graph quantises
            activations dynamically (its scales are those of a whole batch, so the result of a row
            would depend on the others; quantise statically for speed), else all rows at once.
        threads: Threads of a run; None for `torch.get_num_threads()`.
        providers: Execution providers, as of `onnxruntime.InferenceSession`; None for the CPU's.
        options: `onnxruntime.SessionOptions`, instead of `threads`.

    Raises:
        MissingPackageError: onnxruntime is not installed.
        FileNotFoundError: There is no such file.
        OnnxError: The model cannot be loaded, or has inputs or outputs that are not tensors.
        ValueError: An unknown output, or a batch that the graph does not allow.
    """

    def __init__(
        self,
        model: Source | Any,
        *,
        outputs: str | Sequence[str] | None = None,
        batch: int | None = None,
        threads: int | None = None,
        providers: Sequence[Any] | None = None,
        options: Any = None,
    ) -> None:
        super().__init__()
        self._source: Source | None = None
        self._opening = (threads, providers, options)
        if isinstance(model, bytes):
            self._source = model
        elif isinstance(model, str | os.PathLike):
            self._source = os.path.abspath(model)
        elif not (hasattr(model, "run") and hasattr(model, "get_inputs")):
            raise TypeError(
                "model must be a path, bytes or an onnxruntime.InferenceSession, not "
                f"{type(model).__name__}"
            )
        elif any(given is not None for given in self._opening):
            raise ValueError("threads, providers and options are those of the given session")
        self._session: Any = model
        if self._source is not None:
            self._session = open_session(self._source, *self._opening)
        self.inputs = slots(self._session.get_inputs())
        found = {slot.name: slot for slot in slots(self._session.get_outputs())}
        self._single = isinstance(outputs, str) or (outputs is None and len(found) == 1)
        names = [outputs] if isinstance(outputs, str) else list(outputs or found)
        unknown = [name for name in names if name not in found]
        if unknown:
            raise ValueError(f"no output {unknown}; the graph has {list(found)}")
        self.outputs = tuple(found[name] for name in names)
        self._check_types()
        self._batched = batched(self.inputs)
        self.batch = self._choose_batch(batch)

    @property
    def session(self) -> Any:
        """The `onnxruntime.InferenceSession`."""
        return self._session

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the session on a batch.

        Raises:
            OnnxError: An input is missing, unknown or does not fit, or the run fails.
        """
        given = self._named(args, kwargs)
        tensors = (given[slot.name] for slot in self.inputs)
        found = without_backward("an ONNX Runtime session", self._run, *tensors)
        if self._single:
            return found[0]
        return dict(zip((slot.name for slot in self.outputs), found, strict=True))

    def extra_repr(self) -> str:
        """Inputs and outputs with types and shapes, batch, providers."""
        lines = [f"inputs=({', '.join(map(str, self.inputs))})"]
        lines += [f"outputs=({', '.join(map(str, self.outputs))})"]
        providers = ", ".join(self._session.get_providers())
        return ",\n".join([*lines, f"batch={self.batch or 'any'}, providers=({providers})"])

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self._session)] = self._session
        for thing in self._opening:  # options of a session cannot be copied
            memo[id(thing)] = thing
        new.__dict__.update({name: copy.deepcopy(x, memo) for name, x in self.__dict__.items()})
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self._source is None or self._opening[2] is not None:
            what = "a session" if self._source is None else "options"
            raise TypeError(
                f"this OnnxModule was made from {what}, which cannot be pickled; make it from a "
                "path or bytes, with threads= and providers="
            )
        return {name: x for name, x in self.__dict__.items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self._source is not None
        self._session = open_session(self._source, *self._opening)

    def _check_types(self) -> None:
        for what, some in (("input", self.inputs), ("output", self.outputs)):
            for slot in some:
                if slot.dtype is None:
                    hint = "" if what == "input" else "; choose others with outputs="
                    raise OnnxError(
                        f"{what} '{slot.name}' is a {slot.kind}, which has no tensor in torch{hint}"
                    )

    def _choose_batch(self, batch: int | None) -> int | None:
        if batch is not None and (isinstance(batch, bool) or batch < 1):
            raise ValueError(f"batch must be at least 1, not {batch}")
        fixed = self._batched[0].rows if self._batched else None
        if isinstance(fixed, int):
            if batch not in (None, fixed):
                raise ValueError(
                    f"the graph was exported with a fixed batch of {fixed}, not {batch}; export it "
                    f"with a dynamic batch axis: {EXPORT}"
                )
            return fixed
        if batch is None and mixes_rows(self._source or source_of(self._session)):
            return 1
        return batch

    def _named(self, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [slot.name for slot in self.inputs]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        twice = [name for name in names[: len(args)] if name in kwargs]
        missing = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        if missing or unknown or twice or len(args) > len(names):
            raise OnnxError(
                f"the graph takes {names}, got {len(args)} by position and {list(kwargs)} by name"
            )
        return given

    def _run(self, *given: Tensor) -> tuple[Tensor, ...]:
        """All rows, split as the graph or `batch` wants."""
        pairs = zip(self.inputs, given, strict=True)
        feed = {slot.name: slot.convert(x) for slot, x in pairs}
        rows = self._rows(feed)
        parts = [self._run_rows(feed, range(start, stop)) for start, stop in self._pieces(rows)]
        wide = next((x.dtype for x in given if x.is_floating_point()), None)
        device = given[0].device if given else torch.device("cpu")
        found = []
        for some in zip(*parts, strict=True):
            whole = torch.cat(some) if len(some) > 1 else some[0]
            keep = wide is None or not whole.is_floating_point()
            found.append(whole.to(device, whole.dtype if keep else wide))
        return tuple(found)

    def _rows(self, feed: Mapping[str, Tensor]) -> int:
        """Rows of the batch: the length of all inputs with a batch axis."""
        lengths = {slot.name: len(feed[slot.name]) for slot in self._batched}
        if not lengths:
            raise OnnxError("no input of the graph has a batch axis: give it inputs with rows")
        if len(set(lengths.values())) > 1:
            raise OnnxError(f"the first axis of inputs is the batch, but lengths differ: {lengths}")
        return next(iter(lengths.values()))

    def _pieces(self, rows: int) -> list[tuple[int, int]]:
        size = self.batch or max(rows, 1)
        return [(start, min(start + size, rows)) for start in range(0, rows, size)] or [(0, 0)]

    def _run_rows(self, feed: Mapping[str, Tensor], rows: range) -> list[Tensor]:
        names = {slot.name for slot in self._batched}
        pad = 0 if self.batch is None else self.batch - len(rows)
        parts = {
            name: _padded(x[rows.start : rows.stop], pad) if name in names else x
            for name, x in feed.items()
        }
        arrays = {name: x.numpy() for name, x in parts.items()}
        wanted = [slot.name for slot in self.outputs]
        found = [torch.from_numpy(x) for x in run_session(self._session, wanted, arrays)]
        for name, x in zip(wanted, found, strict=True):
            if x.dim() == 0 or len(x) != len(rows) + pad:
                raise OnnxError(
                    f"output '{name}' has shape {tuple(x.shape)} for {len(rows) + pad} rows: the "
                    "first axis of an output must be the batch; choose others with outputs=, or "
                    f"export the model with a dynamic batch axis: {EXPORT}"
                )
        return [x[: len(rows)] for x in found] if pad else found


def _padded(x: Tensor, pad: int) -> Tensor:
    """Copies of the last row added; zeros if there is none."""
    if not pad:
        return x
    last = x[-1:] if len(x) else x.new_zeros(1, *x.shape[1:])
    return torch.cat([x, last.expand(pad, *x.shape[1:])])
