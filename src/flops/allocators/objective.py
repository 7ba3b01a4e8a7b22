"""The objective of allocation, J(A) = sum_j Tr_j / A_j, on feasible real-valued counts.

Up to 1/B^2 it is the trace of the batch gradient's covariance (Theorem 1: less of it means a
better step). The mean of 1/A does not exist for a Gaussian A, and J falls without end as A is
scaled up; so J is always evaluated on counts that are clipped to the floor and sum to the budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def feasible(raw: Array, budget: float, floor: float) -> Array:
    """Counts proportional to the raw ones, at least the floor, that sum to the budget.

    Args:
        raw: Wanted counts, shape (..., B); what is not positive gets the floor.
        budget: Sum of the counts.
        floor: Fewest of a point.
    """
    # A tiny positive share keeps rows without any positive entry at equal counts.
    wanted = np.maximum(raw, 1e-9 * np.maximum(np.abs(raw).max(axis=-1, keepdims=True), 1e-300))
    low = np.zeros(wanted.shape, dtype=bool)
    while True:
        free = budget - floor * low.sum(axis=-1, keepdims=True)
        mass = np.where(low, 0.0, wanted).sum(axis=-1, keepdims=True)
        counts = wanted * (free / np.maximum(mass, 1e-300))
        below = ~low & (counts < floor * (1 - 1e-12))
        if not below.any() or (low | below).all(axis=-1).any():
            return np.where(low, floor, counts)
        low |= below


def objective(traces: Array, counts: Array) -> Array:
    """J for each row of counts; a dropped point (count 0) adds nothing, it is bias instead."""
    safe = np.maximum(counts, 1e-300)
    return np.asarray(np.where(counts > 0, traces / safe, 0.0).sum(axis=-1))


def integer_optimum(traces: Array, budget: int, floor: int = 1) -> NDArray[np.int64]:
    """The integer counts with the least J: greedy, exact because J is separable and convex."""
    ideal = feasible(np.sqrt(traces), float(budget), float(floor))
    counts = np.maximum(np.floor(ideal).astype(np.int64) - 1, floor)
    while (missing := budget - int(counts.sum())) > 0:
        gain = traces / counts - traces / (counts + 1)
        best = np.argsort(-gain, kind="stable")[: max(1, min(missing, len(counts) // 8))]
        counts[best] += 1
    return _exchange(traces, counts, floor)


def _exchange(traces: Array, counts: NDArray[np.int64], floor: int) -> NDArray[np.int64]:
    """Move single queries while that helps; heals what taking several at once did."""
    while True:
        gain = traces / counts - traces / (counts + 1)
        above = counts > floor
        loss = np.where(above, traces / np.maximum(counts - 1, 1) - traces / counts, np.inf)
        to, source = int(gain.argmax()), int(loss.argmin())
        if to == source or gain[to] <= loss[source] * (1 + 1e-12):
            return counts
        counts[to] += 1
        counts[source] -= 1
