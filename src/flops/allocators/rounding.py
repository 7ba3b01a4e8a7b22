"""Rounding: integer counts that sum to the budget, by largest remainder."""

from __future__ import annotations

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
