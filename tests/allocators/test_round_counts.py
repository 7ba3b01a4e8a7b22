"""From shares to counts: sums, floors and units that must hold exactly."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flops import QueryError
from flops.allocators.counts import round_counts

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SHARES = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1e300), st.floats(0, 10)), min_size=1, max_size=40
)
UNITS = st.sampled_from([1, 2])


@st.composite
def problems(draw):
    shares, unit = torch.tensor(draw(SHARES), dtype=torch.float64), draw(UNITS)
    floor = draw(st.integers(0, 5))
    least = -(-floor // unit) * unit
    spare = draw(st.integers(unit, 200))
    return shares, least * len(shares) + spare, unit, floor


@given(problems())
def test_sum_floor_and_unit(problem) -> None:
    shares, budget, unit, floor = problem
    counts = round_counts(shares, budget, unit=unit, floor=floor)
    assert counts.dtype == torch.long
    assert counts.shape == shares.shape
    assert int(counts.sum()) == budget // unit * unit
    assert int(counts.min()) >= floor
    assert not (counts % unit).any()


@given(problems())
def test_larger_shares_get_no_less(problem) -> None:
    shares, budget, unit, floor = problem
    counts = round_counts(shares, budget, unit=unit, floor=floor)
    in_order = counts[torch.sort(shares, stable=True).indices]
    # Equal shares may differ by one unit of the remainder, larger ones must not be behind.
    assert (in_order.diff() >= -unit).all()
    for a, b in zip(*torch.where(shares.unsqueeze(0) > shares.unsqueeze(1)), strict=True):
        assert counts[b] >= counts[a]


def water_filling(shares: Tensor, total: int, least: int) -> Tensor:
    """The textbook loop: whoever is below the floor gets it, the others share the rest."""
    low = torch.zeros(len(shares), dtype=torch.bool)
    while True:
        scaled = shares * (total - least * int(low.sum())) / shares[~low].sum()
        below = ~low & (scaled < least)
        if not below.any():
            return torch.where(low, torch.tensor(float(least)).double(), scaled)
        low |= below


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.integers(0, 4), st.integers(1, 300)
)
def test_largest_remainder_of_water_filling(shares: list[float], floor: int, spare: int) -> None:
    weights = torch.tensor(shares, dtype=torch.float64)
    total = floor * len(shares) + spare
    ideal = water_filling(weights, total, floor)
    counts = round_counts(weights, total, floor=floor)
    assert ((counts - ideal).abs() < 1 + 1e-9).all()
    rest = ideal - ideal.floor()
    up, down = rest[counts > ideal + 1e-9], rest[counts < ideal - 1e-9]
    if len(up) and len(down):
        assert up.min() >= down.max() - 1e-9


@pytest.mark.parametrize("share", [0.0, 5e-324, 1e-30, 1.0, 1e308])
def test_equal_shares(share: float) -> None:
    shares = torch.full((7,), share, dtype=torch.float64)
    assert round_counts(shares, 21).tolist() == [3] * 7
    assert round_counts(shares, 24).tolist() == [4, 4, 4, 3, 3, 3, 3]
    assert round_counts(shares, 29, unit=2).tolist() == [4] * 7


def test_known_allocation() -> None:
    # Two points at the floor leave 8 for shares of 1 : 3.
    assert round_counts(torch.tensor([0.0, 1.0, 0.1, 3.0]), 10).tolist() == [1, 2, 1, 6]
    assert round_counts(torch.tensor([1.0, 1.0, 8.0]), 10, floor=0).tolist() == [1, 1, 8]
    assert round_counts(torch.tensor([0.0, 1.0]), 10, floor=0).tolist() == [0, 10]


def test_one_point_takes_all() -> None:
    assert round_counts(torch.tensor([0.3]), 7).tolist() == [7]
    assert round_counts(torch.tensor([0.0]), 7, unit=2).tolist() == [6]


@given(SHARES, UNITS, st.integers(1, 3))
def test_a_tight_budget_is_the_floor(shares: list[float], unit: int, draws: int) -> None:
    floor = unit * draws
    weights = torch.tensor(shares, dtype=torch.float64)
    counts = round_counts(weights, floor * len(shares), unit=unit, floor=floor)
    assert counts.tolist() == [floor] * len(shares)


@pytest.mark.parametrize(
    ("budget", "unit", "floor"), [(3, 1, 1), (7, 2, 1), (7, 2, 2), (0, 1, 0), (1, 2, 0), (-4, 1, 0)]
)
def test_a_budget_too_small_says_what_would_do(budget: int, unit: int, floor: int) -> None:
    with pytest.raises(QueryError, match=r"too few for 4 points.*raise `queries` to"):
        round_counts(torch.ones(4), budget, unit=unit, floor=floor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1e-9])
def test_bad_shares(bad: float) -> None:
    with pytest.raises(QueryError, match=r"finite and not negative"):
        round_counts(torch.tensor([1.0, bad]), 10)


def test_no_points_at_all() -> None:
    with pytest.raises(QueryError, match="no points"):
        round_counts(torch.empty(0), 10)


def test_many_points_are_fast() -> None:
    size = 10_000
    steep = torch.exp(torch.linspace(0, 60, size, dtype=torch.float64))
    for weights in (torch.rand(size), steep, torch.arange(size).double() ** 8):
        started = time.perf_counter()
        counts = round_counts(weights, 20 * size)
        assert time.perf_counter() - started < 0.5
        assert int(counts.sum()) == 20 * size
        assert int(counts.min()) >= 1
