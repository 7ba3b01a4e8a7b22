"""Small ONNX graphs, and the bundled ViT exported and quantised."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from torch import Tensor, nn

from flops.tasks.classification import bundled_vit
from flops.tasks.data.fashion import PixelSplit, fashion_shots


class Logits(nn.Module):
    """The bundled ViT on garments, as a function of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = bundled_vit(pretrained_head=True).requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vit(pixels).logits


def images(split: PixelSplit) -> Tensor:
    """Normalised as in pretraining, (N, 1, 32, 32)."""
    return F.pad(split.pixels.unsqueeze(1), (2, 2, 2, 2)).float().div(255).sub(0.5).div(0.5)


def exported(model: nn.Module, path: Path, batch: int | None = None) -> Path:
    """Export a model of pixels, with a dynamic batch axis or a fixed batch."""
    axes = {"pixels": {0: "batch"}, "logits": {0: "batch"}} if batch is None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            model,
            (torch.zeros(batch or 2, 1, 32, 32),),
            str(path),
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_axes=axes,
            dynamo=False,
        )
    return path


class _Garments(CalibrationDataReader):
    def __init__(self) -> None:
        self._parts = iter(images(fashion_shots(shift=False).train).split(32))

    def get_next(self) -> dict[str, object] | None:
        part = next(self._parts, None)
        return None if part is None else {"pixels": part.numpy()}


def quantised(path: Path, dynamic: bool = False) -> Path:
    """The int8 version beside a model."""
    int8 = path.with_suffix(f".{'dynamic' if dynamic else 'static'}.onnx")
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it advises preprocessing
    try:
        if dynamic:
            quantize_dynamic(str(path), str(int8), op_types_to_quantize=["MatMul"])
        else:
            # 7 bits: 8 overflow in products on processors without VNNI
            quantize_static(str(path), str(int8), _Garments(), per_channel=True, reduce_range=True)
    finally:
        logging.getLogger().setLevel(level)
    return int8


def graph(
    nodes: Sequence[tuple[str, list[str], list[str]]],
    inputs: dict[str, tuple[int, list[int | str | None]]],
    outputs: dict[str, tuple[int, list[int | str | None]]],
) -> bytes:
    """A model of operators (kind, inputs, outputs), with types and shapes of its ends."""
    made = helper.make_graph(
        [helper.make_node(kind, ins, outs) for kind, ins, outs in nodes],
        "graph",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def doubling(kind: int = TensorProto.FLOAT, rows: int | str | None = "batch") -> bytes:
    """``twice = x + x`` of shape (rows, 3)."""
    return graph(
        [("Add", ["x", "x"], ["twice"])], {"x": (kind, [rows, 3])}, {"twice": (kind, [rows, 3])}
    )


class Counting:
    """A session that notes the rows of its runs."""

    def __init__(self, content: bytes | str) -> None:
        self._session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        self.rows: list[int] = []

    def run(self, names: list[str], feed: dict[str, Any]) -> Any:
        self.rows.append(len(next(iter(feed.values()))))
        return self._session.run(names, feed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
