"""The README is short, and all of its code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flops import StepReport
from flops.blackbox import Tuner
from tests.support.pages import ROOT, python_blocks

README = ROOT / "README.md"


def test_it_is_short() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, lora, tuning = python_blocks(README)
    assert len(first.splitlines()) <= 14
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(short(first), "README.md", "exec"), namespace)
    report = namespace["report"]
    assert isinstance(report, StepReport)
    assert report.loss < 2.35  # log 10 is 2.30
    exec(compile(lora, "README.md", "exec"), namespace)
    exec(compile(tuning, "README.md", "exec"), namespace)
    tuner = namespace["tuner"]
    assert isinstance(tuner, Tuner)
    assert tuner.steps == 30
    assert float((tuner.parameters - 0.5).abs().sum()) < 2.5  # 5 at the start


def short(block: str) -> str:
    """Three batches instead of all."""
    cut = block.replace(".split(64):", ".split(64)[:3]:")
    assert cut != block
    return cut
