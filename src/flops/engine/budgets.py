"""Budgets that groups are not given: automatic numbers of queries, and totals that groups share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Allocator
from flops.allocators.budgets import shared_budgets
from flops.allocators.progress import best_queries
from flops.engine.group_step import budget_of, floor_of
from flops.engine.groups import ResolvedGroup

PATIENCE = 16  # unreliable steps until a group rests
LOOK = 8  # steps between the queries of a group that rests


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
