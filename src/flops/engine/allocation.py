"""Counts of a group's queries: its budget and floor, and what its allocator makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.fixed import Fixed
from flops.engine.groups import ResolvedGroup
from flops.errors import QueryError
from flops.estimators.base import Estimate
from flops.estimators.variance import traces_of


def budget_of(group: ResolvedGroup, size: int, queries: float | None = None) -> int:
    """Queries of a group for ``size`` points, in whole units of the estimator."""
    unit, exact = group.estimator.unit, (group.queries if queries is None else queries) * size
    return int(exact + 1e-9 * exact) // unit * unit  # 1.15 * 100 is 115, not 114.99...


def floor_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Minimum queries of a point, in whole units of the estimator."""
    unit = group.estimator.unit
    return -(-allocator.min_queries // unit) * unit


def least_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Minimum queries of a point in a step: its pilot, and the floor after it."""
    unit = group.estimator.unit
    return -(-allocator.pilot // unit) * unit + max(unit, floor_of(allocator, group))


def counts_of(group: ResolvedGroup, allocator: Allocator, signal: Signal) -> Tensor:
    """Counts of an allocator, in the order of the batch.

    Raises:
        QueryError: If the counts are invalid.
    """
    order = _order(allocator, signal)
    counts = allocator.allocate(signal if order is None else signal.at(order))
    integers = isinstance(counts, Tensor) and counts.dtype == torch.long
    if not integers or counts.shape != signal.losses.shape:
        raise QueryError(
            f"group '{signal.group}': the allocator must return a LongTensor of shape "
            f"{tuple(signal.losses.shape)}, not {counts!r}"
        )
    low, total = int(counts.min()), int(counts.sum())
    if low < 0 or total == 0 or bool((counts % signal.unit).any()):
        raise QueryError(
            f"group '{signal.group}': the allocator must return multiples of {signal.unit}, none "
            f"negative and not all 0, not {counts.tolist()[:8]}"
        )
    if group.estimator.shared and len(set(counts.tolist())) > 1:
        raise QueryError(
            f"group '{group.name}': its draws are shared by the batch, so every point "
            "must get the same number of queries; make `queries` a whole number of "
            f"draws ({group.estimator.unit} queries each), or use per-point draws"
        )
    return counts if order is None else torch.empty_like(counts).index_copy_(0, order, counts)


def learn(allocator: Allocator, signal: Signal, estimate: Estimate) -> None:
    """Train a learned allocator on this batch."""
    if isinstance(allocator, Learner) and estimate.points is not None:
        traces, order = traces_of(estimate, len(signal.losses)), _order(allocator, signal)
        if order is not None:
            signal, traces = signal.at(order), traces.at(order)
        allocator.learn(signal, traces)


def _order(allocator: Allocator, signal: Signal) -> Tensor | None:
    """Points sorted by index, so that random choices and ties do not depend on their order."""
    if signal.index is None or isinstance(allocator, Fixed):  # whose counts are by position
        return None
    return torch.argsort(signal.index)
