"""The quickstart is short, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    whole = QUICKSTART.read_text("utf-8")
    assert len(whole.splitlines()) <= 30
    short = whole.replace("EPOCHS, BATCH = 5, 64", "EPOCHS, BATCH = 1, 64")
    short = short.replace(".split(BATCH)\n", ".split(BATCH)[:8]\n")
    assert len(short) == len(whole) + 4
    exec(compile(short, str(QUICKSTART), "exec"), {})
    accuracy = float(re.findall(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)[-1])
    assert accuracy > 20  # chance is 10; eight steps are few
