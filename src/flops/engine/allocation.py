"""How a group's budget is spent: pilot, allocation, queries, learning.

Counts must not depend on the noise they weight. Without a pilot the queries of a step teach the
allocator for the next one. With a pilot of q queries per point (charged to the budget), it learns
on this very batch, and the two estimates are combined with weights fixed in advance,

    g = a g_pilot + (1 - a) g_later,   a = q / (q + mean later count),

never pooled by 1/A_j, which would bias the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.equal import Equal
from flops.allocators.fixed import Fixed
from flops.allocators.neyman import Neyman, split_budgets
from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work, completed, decided
from flops.engine.queries import Estimate, Ledger, Queries
from flops.engine.report import ShapingReport
from flops.errors import QueryError
from flops.estimators.base import work_of
from flops.estimators.variance import energy, traces_of, variance
from flops.passes.checks import check_counts
from flops.passes.local_vjp import Gradients

PILOT = 7  # sets the pilot's noise apart from the later queries'
KEEP = 0.9  # of a group's running demand from step to step


@dataclass
class Spent:
    """A group's estimate and what it took.

    Attributes:
        gradients: Gradient of the mean loss, by parameter.
        counts: Queries of each point, the pilot included, shape (B,).
        dropped: Points without any query.
        noise: Trace of the covariance of the gradient; 0 if there is no sampling noise.
        signal_to_noise: Squared length of the gradient over that, the noise taken off.
        shaping: What shaped noise knows, if there is any.
        loss: Mean loss, of an estimator that reads no clean pass.
    """

    gradients: Gradients
    counts: Tensor
    dropped: int
    noise: float
    signal_to_noise: float
    shaping: ShapingReport | None = None
    loss: float | None = None


def floor_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Fewest queries of a point, in whole units of the estimator."""
    unit = group.estimator.unit
    return -(-int(getattr(allocator, "min_queries", 1)) // unit) * unit


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


def spend(
    group: ResolvedGroup, binding: Any, allocator: Allocator, signal: Signal, queries: Queries
) -> Spent:
    """Run the queries of one group, and let its allocator learn from them."""
    return completed(spending(group, binding, allocator, signal, queries))


def spending(
    group: ResolvedGroup, binding: Any, allocator: Allocator, signal: Signal, queries: Queries
) -> Work[Spent]:
    """The same, with a stop before every exchange with other processes."""
    total, queries = queries.ledger, replace(queries, ledger=Ledger())
    spent = yield from _spending(group, binding, allocator, signal, queries)
    total.add(queries.ledger)
    return spent


def _spending(
    group: ResolvedGroup, binding: Any, allocator: Allocator, signal: Signal, queries: Queries
) -> Work[Spent]:
    size = queries.size
    if group.estimator.minimum_queries == 0:  # it makes none
        yield
        estimate = yield from work_of(group.estimator, binding, queries)
        none = (0, 0.0, float("inf"))
        return Spent(estimate.gradients, queries.counts, *none, loss=estimate.loss)
    pilot = allocator.pilot if isinstance(allocator, Learner) else 0
    if not pilot:
        counts = queries.team.first(counts_of(group, allocator, signal))
        counts = yield from decided("counts", counts)
        estimate = yield from work_of(group.estimator, binding, replace(queries, counts=counts))
        _learn(allocator, signal, estimate)
        gradients, noise, last = estimate.gradients, variance(estimate, size), estimate
        dropped = int((counts == 0).sum())
    else:
        unit = group.estimator.unit
        first = torch.full((size,), -(-pilot // unit) * unit)
        rest = replace(signal, budget=signal.budget - int(first.sum()))
        if rest.budget < max(unit, signal.minimum) * size:
            raise QueryError(
                f"group '{group.name}': a pilot of {pilot} leaves {rest.budget} of "
                f"{signal.budget} queries for {size} points; raise `queries` or lower the pilot"
            )
        early_queries = replace(queries, counts=first, key=(*queries.key, PILOT))
        early = yield from work_of(group.estimator, binding, early_queries)
        _learn(allocator, rest, early)
        later = queries.team.first(counts_of(group, allocator, rest))
        later = yield from decided("counts", later)
        late = yield from work_of(group.estimator, binding, replace(queries, counts=later))
        share = float(first[0]) / (float(first[0]) + float(later.double().mean()))
        noise = share**2 * variance(early, size) + (1 - share) ** 2 * variance(late, size)
        gradients = _combined(early.gradients, late.gradients, share)
        counts, dropped, estimate, last = first + later, 0, early, late
    queries.settle()
    norm = energy(gradients)
    ratio = max(0.0, norm - noise) / noise if noise > 0 else float("inf")
    if isinstance(allocator, Neyman) and allocator.across_groups:
        queries.memory["query_cost"] = queries.ledger.queries / max(queries.ledger.rows, 1)
        _note_demand(queries.memory, estimate, size, norm)
    shaping = last.shaped.report if last.shaped is not None else None
    return Spent(gradients, counts, dropped, noise, ratio, shaping, estimate.loss)


def total_budgets(
    groups: Sequence[ResolvedGroup],
    allocators: Mapping[str, Allocator],
    memory: Mapping[str, Mapping[str, Any]],
    size: int,
) -> dict[str, int]:
    """Queries of each group; where `Neyman(across_groups=True)` knows the demands, by these."""
    budgets = {group.name: group.budget(size) for group in groups}
    joint = [
        group
        for group in groups
        if getattr(allocators[group.name], "across_groups", False)
        and "demand" in memory[group.name]
    ]
    if len(joint) < 2:
        return budgets
    names = [group.name for group in joint]
    wanted = split_budgets(
        {name: budgets[name] for name in names},
        {name: max(1e-3, float(memory[name]["query_cost"])) for name in names},
        {name: float(memory[name]["demand"]) for name in names},
        # What is configured is enough for a step, or the step itself says so.
        {group.name: min(budgets[group.name], _least(group, allocators, size)) for group in joint},
        # A group whose queries are almost free needs no more.
        {name: 10 * budgets[name] for name in names},
    )
    for group in joint:
        unit = group.estimator.unit
        budgets[group.name] = int(wanted[group.name] + 1e-6) // unit * unit
    return budgets


def _least(group: ResolvedGroup, allocators: Mapping[str, Allocator], size: int) -> int:
    """Fewest queries of a group with which a step works: its pilot, and the floor after it."""
    unit, allocator = group.estimator.unit, allocators[group.name]
    pilot = -(-int(getattr(allocator, "pilot", 0)) // unit) * unit
    return (pilot + max(unit, floor_of(allocator, group))) * size


def counts_of(group: ResolvedGroup, allocator: Allocator, signal: Signal) -> Tensor:
    """Counts of an allocator, in the order of the batch, checked."""
    order = _order(allocator, signal)
    counts = allocator.allocate(signal if order is None else signal.at(order))
    check_counts(counts, signal)
    if order is not None:
        counts = torch.empty_like(counts).index_copy_(0, order, counts)
    if group.estimator.shared and len(set(counts.tolist())) > 1:
        raise QueryError(
            f"group '{group.name}': its draws are shared by the batch, so every point "
            "must get the same number of queries; make `queries` a whole number of "
            f"draws ({group.estimator.unit} queries each), or use independent draws"
        )
    return counts


def _learn(allocator: Allocator, signal: Signal, estimate: Estimate) -> None:
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


def _combined(early: Gradients, late: Gradients, share: float) -> Gradients:
    combined = {p: share * g for p, g in early.items()}
    for parameter, gradient in late.items():
        part = (1 - share) * gradient
        combined[parameter] = combined[parameter] + part if parameter in combined else part
    return combined


def _note_demand(memory: dict[str, Any], estimate: Estimate, size: int, norm: float) -> None:
    """Running sum_j sqrt(Tr_j) / |g|: under Adam only relative errors of a group count."""
    if estimate.points is None or norm <= 0:
        return
    roots = float(traces_of(estimate, size).values.double().sqrt().sum())
    now = roots / norm**0.5
    if not math.isfinite(now):  # slopes overflowed; one such step must not decide all later ones
        return
    memory["demand"] = KEEP * float(memory.get("demand", now)) + (1 - KEEP) * now
