"""The README's code is the quickstart, and all of it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flops.allocators import Signal
from tests.support.onnx_models import Logits, exported, quantised

ROOT = Path(__file__).parents[2]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_first_block_is_the_quickstart() -> None:
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert blocks()[0] == quickstart
    assert len(quickstart.splitlines()) <= 30


def test_code_runs_and_learns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(exported(Logits(), tmp_path / "vit.onnx")).rename(tmp_path / "vit-int8.onnx")
    monkeypatch.chdir(tmp_path)
    first, *others = blocks()
    short = first.replace("EPOCHS, BATCH = 5, 64", "EPOCHS, BATCH = 1, 64")
    short = short.replace(".split(BATCH)\n", ".split(BATCH)[:8]\n")
    assert len(short) == len(first) + 4
    namespace: dict[str, object] = {}
    exec(compile(short, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    accuracy = float(re.findall(r"validation accuracy ([\d.]+)%", printed)[-1])
    assert accuracy > 20  # chance is 10; eight steps are few
    for block in others:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_contributing_guides_allocator_works() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    namespace: dict[str, object] = {}
    exec(
        compile(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], "guide", "exec"), namespace
    )
    signal = Signal(torch.tensor([0.0, 1.0, 3.0]), budget=12, unit=2, minimum=2, group="all")
    assert namespace["ByLoss"]().allocate(signal).tolist() == [2, 2, 8]  # type: ignore[operator]
