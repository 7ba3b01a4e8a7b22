"""A run whose process is killed at any moment ends with the same bits."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.resuming import assert_alike, small

KILLS = int(os.environ.get("FLOPS_KILLS", "30"))  # of processes, in the slow test


def test_killed_processes(unbroken: Path, tmp_path: Path) -> None:
    """SIGKILL before anything is there, in and between steps, and while checkpoints are written."""
    out = tmp_path / "run"
    moments = ["seconds 0.05", "lines 1", "writing 1", "lines 8"]
    assert kill(out, moments) >= 3
    assert_alike(out, unbroken)
    assert not list((out / "checkpoints").glob("unfinished-*"))


def kill(out: Path, moments: list[str]) -> int:
    """Train in processes that are killed at these moments, and then to the end; count them."""
    arguments = [json.dumps(small(output=str(out)).to_dict()), *moments]
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.killing", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.bits
def test_killed_at_random_moments(unbroken: Path, tmp_path: Path) -> None:
    """With the same threads and capability: the same bits, however often and whenever."""
    kills, chance = 0, random.Random(20261116)
    for number in itertools.count():
        lines = sorted(chance.randrange(15) for _ in range(10))
        moments = [f"lines {n} {chance.uniform(0, 0.15):.4f}" for n in lines]
        kills += kill(tmp_path / str(number), moments)
        assert_alike(tmp_path / str(number), unbroken)
        if kills >= KILLS:
            break
    print(f"{kills} kills in {number + 1} runs")
