"""Automatic queries: the most progress per cost, against all other numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from flops.allocators import progress
from flops.allocators.progress import best_queries, isotropic_cosines, note_outlook

FIRST = 16.0


def ratio(memory: dict[str, Any], counts: dict[str, int]) -> float:
    """Progress over cost of some queries."""
    seen = {name: memory[name]["outlook"] for name in counts}
    gain = sum(o["weight"] * o["cosines"][counts[name]] for name, o in seen.items())
    return float(gain / (1 + sum(o["local"] + o["cost"] * counts[n] for n, o in seen.items())))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_numbers_make_more_progress_per_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for name in memory:
        energy, noise = np.exp(rng.normal(0, 2, 2))
        cosines = isotropic_cosines(energy, noise, 10)
        note_outlook(memory[name], energy**0.5, cosines, rng.uniform(0.05, 1), rng.uniform(0, 2))
    found = best_queries(memory, dict.fromkeys(memory, FIRST), {"a": 1, "b": 1})
    every = range(progress.LEAST, progress.MOST + 1)
    best = max(ratio(memory, {"a": a, "b": b}) for a, b in itertools.product(every, every))
    assert ratio(memory, {n: round(q) for n, q in found.items()}) == pytest.approx(best, rel=1e-9)


def test_the_squared_cosine_under_isotropic_noise() -> None:
    """|g|^2 / (|g|^2 + V), and the variance V goes with 1/n."""
    found = isotropic_cosines(energy=3.0, noise=1.0, queries=10)
    assert found[10] == pytest.approx(3 / 4)
    assert found[20] == pytest.approx(3 / 3.5)
    assert found[0] == 0


def test_a_step_of_the_spectrum_is_taken_as_a_whole() -> None:
    """Nothing is gained before the tenth query, and almost everything by it."""
    memory: dict[str, dict[str, Any]] = {"a": {}}
    left = [1.0] * 10 + [0.05] * (progress.MOST - 9)
    note_outlook(memory["a"], 2.0, [1 - error for error in left], 0.1, 1.0)
    assert best_queries(memory, {"a": FIRST}, {"a": 1}) == {"a": 10}


def test_cheap_queries_are_many_and_whole_pairs() -> None:
    memory: dict[str, dict[str, Any]] = {"cheap": {}, "expensive": {}, "new": {}}
    note_outlook(memory["cheap"], 1.0, isotropic_cosines(1.0, 1.0, 10), 1e-6, 0.1)
    note_outlook(memory["expensive"], 1.0, isotropic_cosines(1.0, 1.0, 10), 1.0, 0.1)
    first = {"cheap": FIRST, "expensive": FIRST, "new": 7.0}
    found = best_queries(memory, first, {"cheap": 2, "expensive": 2, "new": 2})
    assert found["cheap"] == progress.MOST
    assert found["expensive"] < 20
    assert found["expensive"] % 2 == 0
    assert found["new"] == 7


def test_running_averages_ignore_what_is_not_finite() -> None:
    memory: dict[str, Any] = {}
    cosines = isotropic_cosines(1.0, 1.0, 10)
    note_outlook(memory, 2.0, cosines, 1.0, 0.1)
    before = dict(memory["outlook"])
    note_outlook(memory, math.inf, cosines, 1.0, 0.1)
    assert memory["outlook"] == before
    note_outlook(memory, 3.0, cosines, 1.0, 0.1)
    assert memory["outlook"]["weight"] == pytest.approx(
        progress.KEEP * 2.0 + (1 - progress.KEEP) * 3.0
    )


def test_a_floor_may_be_above_what_is_looked_ahead() -> None:
    memory: dict[str, dict[str, Any]] = {"a": {}}
    note_outlook(memory["a"], 1.0, isotropic_cosines(1.0, 1.0, 10), 1.0, 0.1)
    assert best_queries(memory, {"a": FIRST}, {"a": 2}, {"a": 99}) == {"a": 100}


def test_each_group_looks_as_far_ahead_as_its_own_outlook() -> None:
    """Almost free queries: all that an outlook speaks of, and none beyond."""
    memory: dict[str, dict[str, Any]] = {"near": {}, "far": {}}
    for name, most in (("near", 10), ("far", 30)):
        note_outlook(memory[name], 1.0, isotropic_cosines(1.0, 1.0, 10)[: most + 1], 1e-6, 0.1)
    found = best_queries(memory, dict.fromkeys(memory, FIRST), dict.fromkeys(memory, 1))
    assert found == {"near": 10, "far": 30}
