"""From query counts to rows: integer allocation, and the plan that every process makes alike.

A row is (point, draw, sign): draw i of a point under +z, or under -z for the second half of an
antithetic pair. Rows are ordered by point and draw and cut into chunks of nearly equal size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flops.errors import QueryError


def round_counts(shares: Tensor, budget: int, *, unit: int = 1, floor: int = 1) -> Tensor:
    """Integer counts in multiples of ``unit`` that sum to the budget, by largest remainder.

    Counts are proportional to the shares, but for points that would fall below the floor: they
    get the floor, and the others share what is left (water-filling).

    Args:
        shares: Non-negative weights of the points, shape (B,); all zero counts as all equal.
        budget: Queries in all; rounded down to the unit.
        unit: Queries of one draw: 1, or 2 for antithetic pairs.
        floor: Fewest queries of a point, rounded up to the unit.

    Returns:
        A LongTensor of shape (B,) whose sum is the budget rounded down to the unit.

    Raises:
        QueryError: If the budget cannot give every point its floor, or if a share is negative
            or not finite.
    """
    size = len(shares)
    if size == 0:
        raise QueryError("there are no points to spread the queries over")
    total, least = budget // unit, -(-floor // unit)
    if total < least * size or total < 1:
        raise QueryError(
            f"{budget} queries are too few for {size} points with at least {least * unit} "
            f"each: raise `queries` to {max(1, least) * unit} or more per point"
        )
    weights = shares.detach().cpu().double()
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise QueryError(
            "allocation shares must be finite and not negative, but lie between "
            f"{float(weights.min())} and {float(weights.max())}"
        )
    # Relative to the largest, so that neither tiny nor huge shares leave the range of floats.
    largest = float(weights.max())
    weights = weights / largest if largest > 0 else torch.ones_like(weights)
    ideal = _water_fill(weights, total, least)
    counts = ideal.floor().long()
    missing = total - int(counts.sum())
    # A stable sort breaks ties by position, so that the result is the same everywhere.
    order = torch.sort(ideal - counts, descending=True, stable=True).indices
    counts[order[:missing]] += 1
    return counts * unit


def _water_fill(weights: Tensor, total: int, least: int) -> Tensor:
    """Real-valued counts: the k smallest weights get the floor, for the first k that fits."""
    ordered = torch.sort(weights)
    mass = ordered.values.flip(0).cumsum(0).flip(0)  # of a weight and all larger ones
    free = total - least * torch.arange(len(weights), dtype=weights.dtype)
    fits = ordered.values * free / mass >= least
    first = int(fits.byte().argmax()) if bool(fits.any()) else len(weights) - 1
    ideal = weights * (free[first] / mass[first])
    ideal[ordered.indices[:first]] = least
    return ideal


@dataclass(frozen=True)
class Rows:
    """A chunk of rows: points, draws and signs of shape (R,), and their weights 1/A_j.

    The weight of a row is one over the number of *draws* of its point: the mean over a point's
    draws, however unequal the counts, so that every point keeps the weight 1/B in the batch.
    """

    points: Tensor
    draws: Tensor
    signs: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.points)

    def part(self, begin: int, end: int) -> Rows:
        """Some rows that follow each other."""
        cut = slice(begin, end)
        return Rows(self.points[cut], self.draws[cut], self.signs[cut], self.weights[cut])


def plan(counts: Tensor, unit: int) -> Rows:
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


def chunks(rows: Rows, size: int, unit: int) -> Iterator[Rows]:
    """Nearly equal chunks of at most ``size`` rows that keep pairs together."""
    for begin, end in spans(len(rows), size, unit):
        yield rows.part(begin, end)


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
    dearest = max(costs, default=1.0)
    ends = list(accumulate(max(c, 1e-3 * dearest) * size for c in costs))  # a row is never free
    bounds = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        at = bisect_left(ends, wanted)
        before = ends[at - 1] if at else 0.0
        row = at * size + round(size * (wanted - before) / (ends[at] - before))
        bounds.append(max(bounds[-1], row))
    return [*bounds, size * len(costs)]
