"""Budgets that groups share: by demand and cost, within bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flops.allocators.budgets import split_budgets


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 4), st.integers(0, 10**6), st.booleans())
def test_split_budgets_is_optimal(size: int, seed: int, bounded: bool) -> None:
    """Against moves of cost between any two groups, which is enough: the sum is convex."""
    rng = np.random.default_rng(seed)
    names = [str(i) for i in range(size)]
    budgets = {n: int(rng.integers(50, 500)) for n in names}
    costs = {n: float(rng.uniform(0.05, 1)) for n in names}
    demands = {n: float(np.exp(rng.normal(0, 1.5))) for n in names}
    least = {n: 0.5 * budgets[n] for n in names} if bounded else dict.fromkeys(names, 0.0)
    most = {n: 2.0 * budgets[n] for n in names} if bounded else dict.fromkeys(names, 1e12)
    found = split_budgets(budgets, costs, demands, *((least, most) if bounded else ()))
    total = sum(budgets[n] * costs[n] for n in names)
    assert sum(found[n] * costs[n] for n in names) == pytest.approx(total, rel=1e-9)
    assert all(least[n] - 1e-9 <= found[n] <= most[n] + 1e-9 for n in names)

    def variance(split: dict[str, float]) -> float:
        return sum(demands[n] ** 2 / split[n] for n in names)

    for a, b in itertools.permutations(names, 2):
        for part in (1e-4, 1e-2, 0.2):
            cost = part * found[a] * costs[a]
            moved = found | {a: found[a] - cost / costs[a], b: found[b] + cost / costs[b]}
            if moved[a] >= least[a] and moved[b] <= most[b]:
                assert variance(moved) >= variance(found) * (1 - 1e-9)


def test_split_budgets_without_demand_keeps_what_is_configured() -> None:
    budgets, costs = {"a": 10, "b": 30}, {"a": 1.0, "b": 0.5}
    assert split_budgets(budgets, costs, {"a": 0.0, "b": 0.0}) == {"a": 10.0, "b": 30.0}
    assert split_budgets(budgets, costs, {"a": np.nan, "b": 1.0}) == {"a": 10.0, "b": 30.0}
