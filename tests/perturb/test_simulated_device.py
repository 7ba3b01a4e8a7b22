"""On another device than the CPU noise is made there: only keys and losses cross over."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.contract import ESTIMATORS

BOUND = 72  # elements: two integers for each of 36 draws; the noise of one draw alone is more
OTHERS = [
    *("bits", "optimizer", "optimizer-pieces"),
    *("tokens", "tokens-shaped", "tokens-es", "tokens-es-shaped", "tokens-es-shared"),
]


@pytest.fixture(scope="module")
def both() -> list[dict[str, tuple[int, float]]]:
    """Of every case the largest copy to the device, and how far its gradients are off.

    First as it is, then with a bug.
    """
    command = [sys.executable, "-m", "tests.support.device_steps"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", [*(n for n in ESTIMATORS if not n.startswith("JVP")), *OTHERS])
def test_steps_on_a_device(both: list[dict[str, tuple[int, float]]], name: str) -> None:
    largest, difference = both[0][name]
    assert 0 < largest <= BOUND
    assert difference < 1e-6  # to the same noise on the CPU, in double precision


def test_a_copy_of_noise_is_seen(both: list[dict[str, tuple[int, float]]]) -> None:
    """The noise of a group that is made on the CPU after all breaks the bound."""
    assert len(both[1]) == 4
    assert all(largest > BOUND for largest, _ in both[1].values())
