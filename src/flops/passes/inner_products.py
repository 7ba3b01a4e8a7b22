"""Inner products of large tensors without a full-size copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

_PIECE = 1 << 18


def inner(a: Tensor, b: Tensor) -> float:
    """<a, b> in double precision."""
    return sum(float((x.double() * y.double()).sum()) for x, y in _pieces(a, b))


def squared_norm(a: Tensor) -> float:
    """|a|^2 of a piece that is in the cache, in single precision if that is in range."""
    a = a.float() if a.dtype.itemsize < 4 else a
    found = float(a.square().sum())
    if 1e-30 < found < math.inf:
        return found
    return float(a.double().square().sum())  # overflow or underflow


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if a.is_contiguous() and b.is_contiguous():
        return zip(a.view(-1).split(_PIECE), b.view(-1).split(_PIECE), strict=True)
    if a.dim() == 0:
        return iter([(a, b)])
    rows = max(1, _PIECE // max(1, a[0].numel())) if len(a) else 1
    return zip(a.split(rows), b.split(rows), strict=True)
