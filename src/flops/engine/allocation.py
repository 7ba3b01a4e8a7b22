"""Allocation: the budgets of the groups, and what an allocator makes of a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Learner, Signal, Traces
from flops.allocators.budgets import shared_budgets
from flops.allocators.fixed import Fixed
from flops.allocators.progress import best_queries
from flops.engine.groups import ResolvedGroup
from flops.errors import QueryError
from flops.estimators.base import Estimate
from flops.estimators.variance import traces_of
from flops.passes.ranks import Replicas

PATIENCE = 16  # unreliable steps until a group rests
LOOK = 8  # steps between the queries of a group that rests


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


def budgets_of(
    groups: Sequence[ResolvedGroup],
    allocators: Mapping[str, Allocator],
    memory: Mapping[str, Mapping[str, Any]],
    size: int,
    step: int,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, int]:
    """Queries of each group for ``size`` points; groups may share a total.

    Args:
        groups: The groups.
        allocators: Allocator of each.
        memory: State of each.
        size: Points.
        step: Steps taken.
        agree: Makes queries per point equal on ranks that round differently.
    """
    automatic = [g for g in groups if g.automatic and g.estimator.makes_queries]
    chosen = _automatic_queries(automatic, allocators, memory, step) if automatic else {}
    if automatic and agree is not None:
        values = agree(torch.tensor([*chosen.values()], dtype=torch.float64)).tolist()
        chosen = dict(zip(chosen, values, strict=True))
    budgets = {g.name: budget_of(g, size, chosen.get(g.name)) for g in groups}
    joint = [g for g in groups if allocators[g.name].across_groups]
    if joint:
        budgets |= shared_budgets(
            {group.name: budgets[group.name] for group in joint},
            {group.name: group.estimator.unit for group in joint},
            {g.name: size * least_of(allocators[g.name], g) for g in joint},
            memory,
        )
    return budgets


def _automatic_queries(
    groups: Sequence[ResolvedGroup],
    allocators: Mapping[str, Allocator],
    memory: Mapping[str, Mapping[str, Any]],
    step: int,
) -> dict[str, float]:
    """Queries per point; a group that stays unreliable is looked at now and then."""
    chosen = best_queries(
        memory,
        {group.name: group.queries for group in groups},
        {group.name: group.estimator.unit for group in groups},
        {group.name: least_of(allocators[group.name], group) for group in groups},
    )
    for group in groups:
        if memory[group.name].get("withheld", 0) >= PATIENCE:
            chosen[group.name] = 0.0 if step % LOOK else group.queries
    return chosen


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


def learn(
    allocator: Allocator, signal: Signal, estimate: Estimate, replicas: Replicas | None = None
) -> None:
    """Train a learned allocator on this batch; with replicas, on the batch of all of them."""
    if not isinstance(allocator, Learner) or estimate.points is None:
        return
    traces, order = traces_of(estimate, len(signal.losses)), _order(allocator, signal)
    if order is not None:
        signal, traces = signal.at(order), traces.at(order)
    if replicas is None or not replicas.several:
        allocator.learn(signal, traces)
        return
    whole, all_traces = joined(signal, traces, replicas, allocator.most_points)
    if (order := _order(allocator, whole)) is not None:
        whole, all_traces = whole.at(order), all_traces.at(order)
    allocator.learn(whole, all_traces)
    allocator.note_own(signal, traces)


def joined(
    signal: Signal, traces: Traces, replicas: Replicas, most: int | None
) -> tuple[Signal, Traces]:
    """Signal and traces of all replicas' points, or of the first of each if these are too many.

    Args:
        signal: Of this replica.
        traces: Of this replica.
        replicas: The replicas.
        most: Largest number of points; None for all.
    """
    sizes, total = replicas.sizes, replicas.total
    if most is not None and total > most:
        sizes = tuple(max(1, most * size // total) for size in sizes)
    count = sizes[replicas.rank]
    each = torch.full_like(traces.values, signal.budget / len(signal.losses))
    places = torch.zeros_like(traces.draws) if signal.index is None else signal.index
    columns = [signal.losses, traces.values, traces.draws, each, places]
    table = torch.stack([column[:count].double() for column in columns], 1)
    losses, values, draws, budgets, index = replicas.gather(table, sizes).unbind(1)
    embeddings = signal.embeddings
    if embeddings is not None:
        embeddings = replicas.gather(embeddings[:count], sizes)
    budget = round(float(budgets.sum())) // signal.unit * signal.unit
    found = replace(
        signal,
        losses=losses.to(signal.losses.dtype),
        budget=budget,
        index=None if signal.index is None else index.long(),
        embeddings=embeddings,
    )
    return found, Traces(values.to(traces.values.dtype), draws.to(traces.draws.dtype))


def _order(allocator: Allocator, signal: Signal) -> Tensor | None:
    """Points sorted by index, so that random choices and ties do not depend on their order."""
    if signal.index is None or isinstance(allocator, Fixed):  # whose counts are by position
        return None
    return torch.argsort(signal.index)
