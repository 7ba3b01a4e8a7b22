"""How a group's budget is spread over its points: floors, counts, learning, shared budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.budgets import shared_budgets
from flops.allocators.equal import Equal
from flops.allocators.fixed import Fixed
from flops.engine.groups import ResolvedGroup
from flops.errors import QueryError
from flops.estimators.base import Estimate
from flops.estimators.variance import traces_of

PILOT = 7  # sets the pilot's noise apart from the later queries'


def floor_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Fewest queries of a point, in whole units of the estimator."""
    unit = group.estimator.unit
    return -(-allocator.min_queries // unit) * unit


def check_allocators(groups: Sequence[ResolvedGroup], allocators: dict[str, Allocator]) -> None:
    """Give groups with shared draws equal counts; refuse if there is no other group.

    With shared draws the points' errors are correlated, and J does not describe the variance.
    """
    noisy = [group for group in groups if group.estimator.minimum_queries > 0]
    for group in noisy:
        if group.estimator.shared and not isinstance(allocators[group.name], Equal | Fixed):
            if all(other.estimator.shared for other in noisy):
                raise QueryError(
                    f"group '{group.name}': all points share its draws, so their errors are "
                    "correlated and no allocation helps; use independent draws (shared=False), "
                    "or leave the allocator out"
                )
            allocators[group.name] = Equal()


def pilot_counts(group: ResolvedGroup, pilot: int, signal: Signal) -> Tensor:
    """Queries of a pilot, shape (B,).

    Raises:
        QueryError: If they leave too few for the rest of the step.
    """
    unit, size = group.estimator.unit, len(signal.losses)
    first = torch.full((size,), -(-pilot // unit) * unit)
    left = signal.budget - int(first.sum())
    if left < max(unit, signal.minimum) * size:
        raise QueryError(
            f"group '{group.name}': a pilot of {pilot} leaves {left} of "
            f"{signal.budget} queries for {size} points; raise `queries` or lower the pilot"
        )
    return first


def pilot_share(first: Tensor, later: Tensor) -> float:
    """Weight of the pilot's gradient: it must not depend on how the later counts are spread."""
    return float(first[0]) / (float(first[0]) + float(later.double().mean()))


def budget_of(group: ResolvedGroup, size: int) -> int:
    """Queries of a group for so many points, in whole units of the estimator."""
    unit, exact = group.estimator.unit, group.queries * size
    return int(exact + 1e-9 * exact) // unit * unit  # 1.15 * 100 is 115, not 114.99...


def total_budgets(
    groups: Sequence[ResolvedGroup],
    allocators: Mapping[str, Allocator],
    memory: Mapping[str, Mapping[str, Any]],
    size: int,
) -> dict[str, int]:
    """Queries of each group; where `Neyman(across_groups=True)` knows the demands, by these."""
    budgets = {group.name: budget_of(group, size) for group in groups}
    joint = [group for group in groups if allocators[group.name].across_groups]
    if not joint:
        return budgets
    return budgets | shared_budgets(
        {group.name: budgets[group.name] for group in joint},
        {group.name: group.estimator.unit for group in joint},
        {group.name: _least(group, allocators, size) for group in joint},
        memory,
    )


def _least(group: ResolvedGroup, allocators: Mapping[str, Allocator], size: int) -> int:
    """Fewest queries of a group with which a step works: its pilot, and the floor after it."""
    unit, allocator = group.estimator.unit, allocators[group.name]
    pilot = -(-allocator.pilot // unit) * unit
    return (pilot + max(unit, floor_of(allocator, group))) * size


def counts_of(group: ResolvedGroup, allocator: Allocator, signal: Signal) -> Tensor:
    """Counts of an allocator, in the order of the batch, checked."""
    order = _order(allocator, signal)
    counts = allocator.allocate(signal if order is None else signal.at(order))
    _check_counts(counts, signal)
    if order is not None:
        counts = torch.empty_like(counts).index_copy_(0, order, counts)
    if group.estimator.shared and len(set(counts.tolist())) > 1:
        raise QueryError(
            f"group '{group.name}': its draws are shared by the batch, so every point "
            "must get the same number of queries; make `queries` a whole number of "
            f"draws ({group.estimator.unit} queries each), or use independent draws"
        )
    return counts


def learn(allocator: Allocator, signal: Signal, estimate: Estimate) -> None:
    """Show a learner what the queries of this batch say about its points."""
    if isinstance(allocator, Learner) and estimate.points is not None:
        traces, order = traces_of(estimate, len(signal.losses)), _order(allocator, signal)
        if order is not None:
            signal, traces = signal.at(order), traces.at(order)
        allocator.learn(signal, traces)


def _order(allocator: Allocator, signal: Signal) -> Tensor | None:
    """Points by their index, so that random choices and ties do not go by the batch's order."""
    if signal.index is None or isinstance(allocator, Fixed):  # its counts are those of places
        return None
    return torch.argsort(signal.index)


def _check_counts(counts: Tensor, signal: Signal) -> None:
    """Refuse counts that no plan can follow, whatever allocator they come from.

    Raises:
        QueryError: With what was returned and what is allowed.
    """
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
