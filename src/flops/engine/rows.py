"""From query counts to rows: the plan that every rank makes alike.

A row is (point, draw, sign): draw i of a point under +z, or under -z for the second half of an
antithetic pair. Rows are ordered by point and draw and cut into chunks of nearly equal size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flops.engine.collectives import Collectives
from flops.estimators.base import BatchPlan, Plan, PointPlan, Rows


def plan_rows(counts: Tensor, unit: int) -> Rows:
    """All rows of a group, in order."""
    draws_of = counts // unit
    points = torch.repeat_interleave(torch.arange(len(counts)), draws_of)
    firsts = torch.cumsum(draws_of, 0) - draws_of
    draws = torch.arange(len(points)) - firsts[points]
    weights = 1.0 / draws_of[points].double()
    signs = torch.ones(len(points))
    if unit == 2:  # partners stand side by side, on the same point
        points, draws, weights = (x.repeat_interleave(2) for x in (points, draws, weights))
        signs = torch.tensor([1.0, -1.0]).repeat(len(signs))
    return Rows(points, draws, signs, weights)


def own_chunks(plan: Plan, size: int, chunk: int, ranks: Collectives) -> Iterator[Rows]:
    """This rank's share of the rows of a plan, cut into chunks.

    Args:
        plan: What an estimation wants to run.
        size: Points of the batch.
        chunk: Most rows of a chunk; partners of a pair stay together.
        ranks: Ranks that share the rows.
    """
    if isinstance(plan, PointPlan):
        rows = plan_rows(plan.counts, plan.unit)
        rows = rows.part(*ranks.shard(len(rows), plan.unit))
        for begin, end in spans(len(rows), chunk, plan.unit):
            yield rows.part(begin, end)
        return
    begin, end = batch_bounds(plan, size, ranks)[ranks.rank : ranks.rank + 2]
    for number in range(begin // size, -(-end // size)):
        low, high = max(begin - number * size, 0), min(end - number * size, size)
        for a, b in spans(high - low, chunk):
            points = torch.arange(low + a, low + b)
            ones = torch.ones(len(points))
            yield Rows(points, torch.full_like(points, number), ones, ones / size)


def batch_bounds(plan: BatchPlan, size: int, ranks: Collectives) -> list[int]:
    """Rows of a `BatchPlan` at which the ranks' shares begin and end."""
    return shares([1 - prefix.share for prefix in plan.prefixes], size, ranks.size)


def gathered(
    plans: Sequence[tuple[Plan, Sequence[Tensor], torch.dtype]], size: int, ranks: Collectives
) -> list[tuple[Tensor, Tensor]]:
    """Values of all ranks, in the order of each plan, and their points; one message for all.

    Args:
        plans: Each with what the chunks that ran here returned, and its type.
        size: Points of the batch.
        ranks: Ranks that share the rows.
    """
    mine, points = [], []
    for plan, values, dtype in plans:
        own = torch.cat([torch.empty(0, dtype=dtype), *values])
        if isinstance(plan, PointPlan):
            at = plan_rows(plan.counts, plan.unit).points[:: plan.unit]
            begin, _ = ranks.shard(len(at))
        else:
            at = torch.arange(size).repeat(len(plan.prefixes))
            begin = batch_bounds(plan, size, ranks)[ranks.rank]
        mine.append((own, begin))
        points.append(at)
    if ranks.alone:
        return [(own, at) for (own, _), at in zip(mine, points, strict=True)]
    whole = torch.zeros(sum(len(at) for at in points), dtype=torch.float64)
    offset = 0
    for (own, begin), at in zip(mine, points, strict=True):
        whole[offset + begin : offset + begin + len(own)] = own.double()
        offset += len(at)
    parts = ranks.all_gather(whole, 0, len(whole)).split([len(at) for at in points])
    typed = [part.to(dtype) for part, (*_, dtype) in zip(parts, plans, strict=True)]
    return list(zip(typed, points, strict=True))


def spans(count: int, size: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut ``count`` rows into nearly equal spans of at most ``size``, at multiples of the unit.

    One-row kernels round differently, so no span has a single row unless there is just one in
    all; for that a span may have three rows where the size is two.
    """
    if count == 0:
        return []
    pieces = -(-count // max(unit, size - size % unit))
    pieces = min(pieces, max(1, count // 2))
    return list(pairwise(unit * (count // unit * i // pieces) for i in range(pieces + 1)))


def shares(costs: Sequence[float], size: int, ranks: int) -> list[int]:
    """Bounds that share out rows, ``size`` of each cost in turn, at nearly the same cost.

    Returns:
        ``ranks + 1`` numbers from 0 to the number of rows; rank r has the rows between two of them.
    """
    most = max(costs, default=1.0)
    ends = list(accumulate(max(c, 1e-3 * most) * size for c in costs))  # a row is never free
    bounds = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        at = bisect_left(ends, wanted)
        before = ends[at - 1] if at else 0.0
        row = at * size + round(size * (wanted - before) / (ends[at] - before))
        bounds.append(max(bounds[-1], row))
    return [*bounds, size * len(costs)]
