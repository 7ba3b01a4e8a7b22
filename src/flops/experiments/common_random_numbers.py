"""Common random numbers: several estimates of a batch share the losses of their queries.

Draw i of a point does not depend on the counts (`flops.perturb.random`), so estimates of one batch
under other allocations and budgets share most of their losses. Here each loss is computed once;
noise, weights and gradients still come from the estimator. Comparisons are paired draw by draw, and
several times cheaper.

Not for noise that depends on more than (key, point, draw): orthogonal or shaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flops.allocators import Allocator, Fixed, Signal
from flops.diagnostics.spend import Spent, spend
from flops.engine.group_step import budget_of, counts_of, floor_of
from flops.engine.groups import ResolvedGroup
from flops.engine.step import Query, Session, run_query
from flops.estimators.base import Queries, RowResults


class RememberedLosses:
    """Runs a query, unless all of its losses are cached.

    Attributes:
        losses: By point, draw and sign; NaN if not computed yet, shape (B, draws, 2).
        runs: Number of rows run.
    """

    def __init__(self, size: int, draws: int, dtype: torch.dtype) -> None:
        self.losses = torch.full((size, draws, 2), torch.nan, dtype=dtype)
        self.runs = 0

    def __call__(self, query: Query) -> RowResults:
        """Losses of the rows."""
        rows = query.rows
        place = (rows.points, rows.draws, (rows.signs < 0).long())
        if bool(torch.isnan(self.losses[place]).any()):
            self.losses[place] = run_query(query).losses.cpu()
            self.runs += len(rows.points)
        return RowResults(self.losses[place])


def spend_sharing(
    session: Session,
    group: ResolvedGroup,
    binding: Any,
    chosen: Sequence[tuple[float, Allocator]],
    signal: Signal,
    queries: Queries,
) -> list[Spent]:
    """Estimates of one group on one batch, by mean queries and allocator, with the same draws.

    Args:
        session: The batch.
        group: The group; its own number of queries is not used.
        binding: Binding of its estimator to the model.
        chosen: Mean queries per point and allocator of each estimate; allocators without a pilot.
            They learn from their own queries.
        signal: Input of the allocators; budget and floor are filled in.
        queries: The queries of a step of this group.
    """
    planned = []
    for mean, allocator in chosen:
        sized = replace(group, queries=mean)
        floor = floor_of(allocator, group)
        own = replace(signal, budget=budget_of(sized, queries.size), minimum=floor)
        planned.append((sized, allocator, own, counts_of(sized, allocator, own)))
    most = torch.stack([counts for *_, counts in planned]).amax(0)  # (B,)
    draws = int(most.max()) // group.estimator.unit
    run = RememberedLosses(queries.size, draws, queries.losses.dtype)
    given = replace(signal, budget=int(most.sum()), minimum=0)
    spend(session, group, binding, Fixed(most), given, queries, run)
    return [
        spend(session, sized, binding, allocator, own, queries, run)
        for sized, allocator, own, _ in planned
    ]
