"""The objective of allocation, J(A) = sum_j Tr_j / A_j, on feasible real-valued counts.

Up to 1/B^2 it is the trace of the batch gradient's covariance (Theorem 1: less of it means a
better step). The mean of 1/A does not exist for a Gaussian A, and J falls without end as A is
scaled up; so J is always evaluated on counts that are clipped to the floor and sum to the budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flops.errors import QueryError

Array = NDArray[np.float64]


def feasible(raw: Array, budget: float, floor: float) -> Array:
    """Counts proportional to the raw ones, at least the floor, that sum to the budget.

    Args:
        raw: Wanted counts, shape (..., B); what is not positive gets the floor. Rows without any
            positive entry get equal counts.
        budget: Sum of the counts, at least the floor for every point.
        floor: Fewest of a point.
    """
    wanted = np.maximum(raw, 0.0)
    # Relative to the largest, so that neither tiny nor huge ones leave the range of floats.
    largest = wanted.max(axis=-1, keepdims=True)
    wanted = np.where(largest > 0, wanted / np.where(largest > 0, largest, 1.0), 1.0)
    # The k smallest get the floor, for the first k with which the next one stays above it.
    order = np.argsort(wanted, axis=-1, kind="stable")
    ordered = np.take_along_axis(wanted, order, axis=-1)
    mass = np.flip(np.flip(ordered, axis=-1).cumsum(axis=-1), axis=-1)
    free = budget - floor * np.arange(wanted.shape[-1])
    fits = ordered * free >= floor * mass
    fits[..., -1] = True
    first = fits.argmax(axis=-1, keepdims=True)
    scale = free[first] / np.take_along_axis(mass, first, axis=-1)
    ranks = np.argsort(order, axis=-1, kind="stable")
    return np.where(ranks < first, floor, np.maximum(wanted * scale, floor))


def objective(traces: Array, counts: Array) -> Array:
    """J for each row of counts; a dropped point (count 0) adds nothing, it is bias instead."""
    safe = np.maximum(counts, 1e-300)
    return np.asarray(np.where(counts > 0, traces / safe, 0.0).sum(axis=-1))


def integer_optimum(traces: Array, budget: int, floor: int = 1) -> NDArray[np.int64]:
    """The integer counts with the least J: greedy, exact because J is separable and convex.

    Raises:
        QueryError: If the floor is below 1, where J has no value, or the budget below the floors.
    """
    if floor < 1 or budget < floor * len(traces):
        raise QueryError(
            f"{budget} queries cannot give {len(traces)} points {floor} or more each; the "
            "optimum needs at least one query for every point"
        )
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
