"""Whether the rows of a batch leave each other alone, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def steady(function: Callable[..., Tensor], rows: Sequence[Tensor], size: int) -> bool:
    """Whether a row's result is bitwise the same at every position and with other neighbours.

    Args:
        function: Of one or more batches, row by row.
        rows: Its arguments, with twice as many rows as the largest size.
        size: Rows of a batch.
    """
    batch, others = [r[:size] for r in rows], [r[-size:] for r in rows]
    expected = function(*batch)
    copies = function(*(r[:1].expand_as(r).contiguous() for r in batch))
    if not torch.equal(copies, expected[:1].expand_as(copies)):
        return False
    for shift in {0, 1, size // 2, size - 1}:
        if not torch.equal(function(*(r.roll(shift, 0) for r in batch)), expected.roll(shift, 0)):
            return False
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
            if not torch.equal(function(*mixed)[kept], expected[kept]):
                return False
    return True
