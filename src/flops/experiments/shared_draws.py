"""Queries whose losses are remembered, so that several estimates of a batch can share them.

Draw i of a point is the same whatever the counts (`flops.perturb.random`), so estimates of one
batch under other allocations and budgets ask the model for losses that are mostly known already.
Here they are run once; noise, weights and gradients are still made by the estimator itself. It
makes comparisons paired to the last draw, and several times cheaper.

Not for noise that depends on more than (key, point, draw): orthogonal or shaped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from flops.allocators import Allocator, Signal
from flops.engine.allocation import Spent, counts_of, floor_of, spend
from flops.engine.groups import ResolvedGroup
from flops.engine.queries import Queries
from flops.engine.rows import Rows
from flops.passes.intercept import Action
from flops.passes.prefix import Prefix
from flops.passes.replay import Edit


@dataclass
class Known:
    """Losses by point, draw and sign; NaN where not known yet, shape (B, draws, 2)."""

    losses: Tensor
    waiting: deque[Rows] = field(default_factory=deque)
    runs: int = 0


@dataclass(frozen=True)
class SharedQueries(Queries):
    """Queries that run what is not known yet.

    Attributes:
        known: What the queries of this batch and key showed so far.
    """

    known: Known

    def chunks(self, unit: int, rank: int | None = None) -> Iterator[Rows]:
        """The chunks of `Queries`, noted, since `run` is told the points of its rows only."""
        found = list(super().chunks(unit, rank))
        self.known.waiting = deque(found)
        return iter(found)

    def run(
        self,
        prefix: Prefix,
        points: Tensor,
        *,
        edits: Mapping[int, Edit] | None = None,
        around: Mapping[int, Action] | None = None,
    ) -> Tensor:
        """Perturbed losses of the next chunk, from what is known if all of it is."""
        rows = self.known.waiting.popleft()
        assert torch.equal(rows.points, points), "chunks must be run in their order"
        place = (rows.points, rows.draws, (rows.signs < 0).long())
        found = self.known.losses[place]
        if bool(torch.isnan(found).any()):
            found = super().run(prefix, points, edits=edits, around=around).cpu()
            self.known.losses[place] = found
            self.known.runs += len(rows)
        return found


def spend_sharing(
    group: ResolvedGroup,
    binding: Any,
    chosen: Sequence[tuple[float, Allocator]],
    signal: Signal,
    queries: Queries,
) -> list[Spent]:
    """Estimates of one group on one batch, by mean queries and allocator, with the same draws.

    Args:
        group: The group; its own number of queries is not used.
        binding: What its estimator worked out.
        chosen: Mean queries per point and allocator of each estimate; allocators without a pilot.
            They learn from their own queries.
        signal: What allocators know; budget and floor are filled in.
        queries: The queries of a step of this group.
    """
    asked = []
    for mean, allocator in chosen:
        sized = replace(group, queries=mean)
        floor = floor_of(allocator, group)
        own = replace(signal, budget=sized.budget(queries.size), minimum=floor)
        asked.append((sized, allocator, own, counts_of(sized, allocator, own)))
    most = torch.stack([counts for *_, counts in asked]).amax(0)  # (B,)
    draws = int(most.max()) // group.estimator.unit
    known = Known(torch.full((queries.size, draws, 2), torch.nan, dtype=queries.losses.dtype))
    given = {f.name: getattr(queries, f.name) for f in fields(queries)}
    shared = SharedQueries(**given, known=known)
    group.estimator.estimate(binding, replace(shared, counts=most))
    return [spend(sized, binding, allocator, own, shared) for sized, allocator, own, _ in asked]
