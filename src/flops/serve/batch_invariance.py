"""Batch invariance: how much a row's result depends on the rest of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def deviation(function: Callable[..., Tensor], rows: Sequence[Tensor], size: int) -> float:
    """Largest difference between results of a row, over positions, neighbours and repeats.

    The order of summation in a matrix product depends on the shape, the threads, the kernel and, at
    the edge of a tile, on the position of a row; never on values. So bitwise equality for these
    rows holds for all rows of this shape in this process.

    Args:
        function: Row-wise function of one or more batches.
        rows: Its arguments, with twice as many rows as the largest size.
        size: Rows per batch.

    Returns:
        0.0 if all results of a row are bitwise equal; infinity if only some of them are finite.
    """
    most = 0.0
    for found, expected in _pairs(function, rows, size):
        if torch.equal(found, expected):
            continue
        difference = float((found - expected).abs().max())
        most = max(most, difference if math.isfinite(difference) else math.inf)
    return most


def _pairs(
    function: Callable[..., Tensor], rows: Sequence[Tensor], size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of results that should be equal."""
    batch, others = [r[:size] for r in rows], [r[-size:] for r in rows]
    expected = function(*batch)
    copies = function(*(r[:1].expand_as(r).contiguous() for r in batch))
    yield copies, expected[:1].expand_as(copies)
    for shift in sorted({0, 1, size // 2, size - 1}):
        yield function(*(r.roll(shift, 0) for r in batch)), expected.roll(shift, 0)
    odd = torch.arange(size) % 2 == 1
    for kept in (odd, ~odd):
        for neighbours in (
            others,
            [torch.zeros_like(r) for r in batch],
            [1e38 * r for r in others],
        ):
            mixed = []
            for row, neighbour in zip(batch, neighbours, strict=True):
                mixed.append(neighbour.clone())
                mixed[-1][kept] = row[kept]
            if bool(kept.any()):
                yield function(*mixed)[kept], expected[kept]
