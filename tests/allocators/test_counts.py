"""The objective J: feasible counts, integer optimum, theorem 2."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flops.allocators.counts import feasible, integer_optimum, objective, round_counts
from flops.errors import QueryError

POSITIVE = arrays.arrays(np.float64, st.integers(2, 12), elements=st.floats(1e-6, 1e6))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.integers(1, 12)),
        elements=st.one_of(st.floats(-5, 5), st.sampled_from([0.0, 1e-320, 1e-200, 1e200])),
    ),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([0.0, 0.5, 20.0]),
)
def test_feasible_counts(raw: np.ndarray, floor: float, more: float) -> None:
    size = raw.shape[1]
    budget = max(1, int(size * (floor + more)))
    counts = feasible(raw, float(budget), floor)
    np.testing.assert_allclose(counts.sum(axis=1), budget, rtol=1e-12)
    assert (counts >= floor).all()
    for wanted, got in zip(raw, counts, strict=True):
        order = np.argsort(wanted)
        assert (np.diff(got[order]) >= -1e-9 * budget).all()
        # Row by row, whatever the other rows are, and as the integer counts do.
        np.testing.assert_allclose(feasible(wanted, float(budget), floor), got, rtol=1e-12)
        shares = torch.from_numpy(np.maximum(wanted, 0))
        rounded = round_counts(shares, budget, floor=int(floor)).numpy()
        assert (np.abs(rounded - got) < 1 + 1e-6).all()


def test_feasible_by_hand() -> None:
    np.testing.assert_allclose(feasible(np.array([1.0, 3.0]), 8, 0), [2, 6])
    np.testing.assert_allclose(feasible(np.array([1.0, 99.0]), 10, 1), [1, 9])
    np.testing.assert_allclose(feasible(np.array([-1.0, 2.0, 2.0]), 9, 1), [1, 4, 4])
    np.testing.assert_allclose(feasible(np.array([-1.0, 2.0, 2.0]), 9, 0), [0, 4.5, 4.5])
    np.testing.assert_allclose(feasible(np.array([-1.0, -2.0]), 4, 1), [2, 2])
    np.testing.assert_allclose(feasible(np.zeros(4), 8, 1), [2, 2, 2, 2])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    arrays.arrays(np.float64, st.integers(1, 4), elements=st.floats(0, 100)),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_integer_optimum_is_that_of_enumeration(true: np.ndarray, floor: int, more: int) -> None:
    size, budget = len(true), floor * len(true) + more
    counts = integer_optimum(true, budget, floor)
    assert counts.sum() == budget
    assert counts.min() >= floor
    best = min(
        objective(true, np.array(c, dtype=float))
        for c in itertools.product(range(floor, floor + more + 1), repeat=size)
        if sum(c) == budget
    )
    assert objective(true, counts.astype(float)) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_integer_optimum_of_many_points_cannot_be_improved() -> None:
    true = np.random.default_rng(0).lognormal(0, 2, 300)
    counts = integer_optimum(true, 300 * 7)
    assert counts.sum() == 2100
    gain = (true / counts - true / (counts + 1)).max()
    loss = np.where(counts > 1, true / np.maximum(counts - 1, 1) - true / counts, np.inf).min()
    assert gain <= loss * (1 + 1e-9)
    ideal = feasible(np.sqrt(true), 2100.0, 1.0)
    j = objective(true, counts.astype(float))
    assert objective(true, ideal) <= j < 1.01 * objective(true, ideal)


def test_integer_optimum_needs_a_query_for_everybody() -> None:
    with pytest.raises(QueryError, match="2 queries cannot give 3 points 1 or more"):
        integer_optimum(np.ones(3), 2)
    with pytest.raises(QueryError, match="at least one"):
        integer_optimum(np.ones(3), 5, floor=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(POSITIVE, st.floats(1, 1000))
def test_theorem_2_is_an_equality(true: np.ndarray, mean: float) -> None:
    """J_equal - J_Neyman = (1/A_0) sum_{j<k} (sqrt Tr_j - sqrt Tr_k)^2, for any traces."""
    budget, roots = mean * len(true), np.sqrt(true)
    equal = objective(true, np.full(len(true), mean))
    neyman = objective(true, feasible(roots, budget, 0.0))
    pairs = sum((a - b) ** 2 for a, b in itertools.combinations(roots, 2)) / budget
    assert equal - neyman == pytest.approx(pairs, rel=1e-6, abs=1e-9 * float(equal))
