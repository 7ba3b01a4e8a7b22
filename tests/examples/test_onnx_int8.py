"""The example of an int8 model in ONNX Runtime."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options: str) -> str:
    command = [sys.executable, "examples/onnx_int8.py", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_forward_passes_in_int8_are_near_backpropagation_in_float() -> None:
    said = run("--rates", "0.03")
    head, _, forward = (
        tuple(map(float, re.findall(r"(?:float|int8) ([\d.]+) ±", line)))
        for line in said.splitlines()
        if "test accuracy" in line
    )
    (gap,) = re.findall(r"minus backpropagation in float: (-?[\d.]+) ±", said)
    assert float(gap) > -3
    assert forward[1] > head[1] + 2
    assert "parameters: 0" in said


@pytest.mark.slow
def test_the_sweep_of_sigmas_prefers_the_automatic_one() -> None:
    found = dict(re.findall(r"sigma ([\w.]+): cosine (-?[\d.]+)", run("--sigmas")))
    auto = float(found.pop("auto"))
    assert auto > 0.9 * max(map(float, found.values()))
