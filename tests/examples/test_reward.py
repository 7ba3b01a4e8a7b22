"""The example of a reward on generated text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flops.tasks.models.language import REAL_MODELS, SMOLLM2

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ten_steps_make_answers_better() -> None:
    if not (ROOT / REAL_MODELS / SMOLLM2).is_dir():
        pytest.skip("run `make real-models` first")
    command = [sys.executable, "examples/reward.py", "1", "10"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = re.findall(r"reward ([\d.]+) -> ([\d.]+)", ran.stdout)[0]
    assert float(after) > float(before) + 0.2
