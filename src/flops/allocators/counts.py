"""Counts: feasible counts, the objective J, and rounding to integers.

Up to 1/B^2 the objective J(A) = sum_j Tr_j / A_j is the trace of the batch gradient's covariance
(Theorem 1: the lower, the better the step). E[1/A] does not exist for a Gaussian A, and J has no
minimum as A is scaled up; so J is always evaluated on counts that are clipped to the floor and sum
to the budget. A step uses such counts, rounded by largest remainder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flops.allocators.base import Signal, Traces
from flops.errors import QueryError

Array = NDArray[np.float64]


def feasible(raw: Array, budget: float, floor: float) -> Array:
    """Counts proportional to the raw ones, at least the floor, that sum to the budget.

    Points below the floor get the floor, and the others share the rest (water-filling).

    Args:
        raw: Unnormalised counts, shape (..., B); non-positive ones get the floor. Rows without any
            positive entry get equal counts.
        budget: Sum of the counts, at least the floor for every point.
        floor: Minimum count of a point.
    """
    wanted = np.maximum(raw, 0.0)
    # Relative to the largest, to avoid overflow and underflow.
    largest = wanted.max(axis=-1, keepdims=True)
    wanted = np.where(largest > 0, wanted / np.where(largest > 0, largest, 1.0), 1.0)
    # The k smallest get the floor, for the smallest k at which the next one is above it.
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


def round_counts(shares: Tensor, budget: int, *, unit: int = 1, floor: int = 1) -> Tensor:
    """Integer counts in multiples of ``unit`` that sum to the budget, by largest remainder.

    Args:
        shares: Non-negative weights of the points, shape (B,); equal if all are zero.
        budget: Total queries; rounded down to the unit.
        unit: Queries of one draw: 1, or 2 for antithetic pairs.
        floor: Minimum queries of a point, rounded up to the unit.

    Returns:
        A LongTensor of shape (B,) whose sum is the budget rounded down to the unit.

    Raises:
        QueryError: If the budget is too small for the floor, or if a share is negative or not
            finite.
    """
    size = len(shares)
    if size == 0:
        raise QueryError("there are no points to allocate queries to")
    total, least = budget // unit, -(-floor // unit)
    if total < least * size or total < 1:
        raise too_few(budget, size, least * unit, unit)
    weights = shares.detach().cpu().double()
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise QueryError(
            "allocation shares must be finite and not negative, but lie between "
            f"{float(weights.min())} and {float(weights.max())}"
        )
    ideal = torch.from_numpy(feasible(weights.numpy(), float(total), float(least)))
    counts = ideal.floor().long()
    missing = total - int(counts.sum())
    # A stable sort breaks ties by position, for the same result on all machines.
    order = torch.sort(ideal - counts, descending=True, stable=True).indices
    counts[order[:missing]] += 1
    return counts * unit


def too_few(budget: int, size: int, floor: int, unit: int) -> QueryError:
    """The error for a budget that is too small for the floor."""
    return QueryError(
        f"{budget} queries are too few for {size} points with at least {floor} each: raise "
        f"`queries` to {max(unit, floor)} or more per point"
    )


def measured(signal: Signal, traces: Traces) -> tuple[Signal, Traces]:
    """The points with a valid trace, and their part of the budget.

    A point without draws has no trace, which is not a trace of zero; and a point whose directional
    derivatives overflow must not affect the others.
    """
    values = traces.values
    known = torch.nonzero((traces.draws > 0) & torch.isfinite(values) & (values >= 0)).flatten()
    size = len(values)
    if len(known) == size:
        return signal, traces
    part = replace(signal.at(known), budget=signal.budget * len(known) // size)
    return part, traces.at(known)


def objective(traces: Array, counts: Array) -> Array:
    """J for each row of counts; a dropped point (count 0) adds bias, but no variance."""
    safe = np.maximum(counts, 1e-300)
    return np.asarray(np.where(counts > 0, traces / safe, 0.0).sum(axis=-1))


def integer_optimum(traces: Array, budget: int, floor: int = 1) -> NDArray[np.int64]:
    """The integer counts that minimise J: greedy, exact because J is separable and convex.

    Raises:
        QueryError: If the floor is below 1, where J is undefined, or the budget below the floors.
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
    """Move single queries while J decreases; corrects the greedy moves of several queries."""
    while True:
        gain = traces / counts - traces / (counts + 1)
        above = counts > floor
        loss = np.where(above, traces / np.maximum(counts - 1, 1) - traces / counts, np.inf)
        to, source = int(gain.argmax()), int(loss.argmin())
        if to == source or gain[to] <= loss[source] * (1 + 1e-12):
            return counts
        counts[to] += 1
        counts[source] -= 1
