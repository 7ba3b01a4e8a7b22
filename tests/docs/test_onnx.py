"""The code of docs/onnx.md runs, on an int8 file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor

from flops.engine.report import StepReport
from flops.integrations.onnxruntime import OnnxModule
from flops.tasks.data.fashion import fashion_shots
from tests.support.onnx_models import Logits, exported, images, quantised

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    quantised(exported(Logits(), tmp_path / "vit.onnx")).rename(tmp_path / "vit-int8.onnx")
    monkeypatch.chdir(tmp_path)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    shots = fashion_shots(shift=False).train
    namespace = {
        "images": images(shots)[:64],
        "labels": shots.labels[:64],
        "loss_fn": loss_fn,
    }
    exec(compile(block, str(PAGE), "exec"), namespace)
    model, report = namespace["model"], namespace["report"]
    assert isinstance(model[1], OnnxModule)  # type: ignore[index]
    assert isinstance(report, StepReport)
    assert report.queries >= 2 * 32 * 20
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight  # type: ignore[attr-defined]
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 0
