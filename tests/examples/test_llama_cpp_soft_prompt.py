"""The example of a soft prompt in llama.cpp; needs `make real-models`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flops.tasks.models.language import REAL_MODELS, SMOLLM2

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None
        or not (ROOT / REAL_MODELS / SMOLLM2).is_dir(),
        reason="run `make real-models` first",
    ),
]


def run(*options: str) -> str:
    command = [sys.executable, "examples/llama_cpp_soft_prompt.py", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_vector_learns_on_sentences_that_were_not_trained_on() -> None:
    said = run("--validation")
    before, after = re.findall(r"accuracy (?:before|after).* ([\d.]+) %, loss ([\d.]+)", said)
    assert float(after[0]) > float(before[0]) + 15
    assert float(after[1]) < float(before[1]) - 0.4


def test_small_noise_is_lost_in_the_rounding_of_activations() -> None:
    said = run("--sigmas")
    odd = [float(x) for x in re.findall(r"odd part ([\d.]+)", said)]
    cosines = [float(x) for x in re.findall(r"cosine (-?[\d.]+)", said)]
    assert odd[0] > 3 * odd[-1] * 0.003 / 0.1  # far above its share: rounding
    assert cosines[0] < cosines[-1]
