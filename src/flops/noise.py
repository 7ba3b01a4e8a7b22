"""Keyed noise: every draw follows from (seed, step, group, point) and is never stored.

A point's draws follow each other from its key, so they are the same for any chunk size, any
number of processes and, with data set indices, any order of the points. All generators are
private; the global random state is never touched.

Rows are unit noise with E[z z^T] = I; estimators scale by sigma.

- gaussian: z ~ N(0, I).
- rademacher: independent signs.
- orthogonal: directions of one point mutually orthogonal, of length sqrt(d), uniformly random.
  Once a point has d draws their mean of z z^T is the identity, so the estimate is exact for a
  linear loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["gaussian", "rademacher", "orthogonal"]
KINDS: tuple[str, ...] = get_args(Kind)

_BLOCK = 16  # torch fills normals in blocks of 16: rows of whole blocks follow each other exactly
_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash integers to a 64-bit key (splitmix64), so that neighbouring keys have nothing alike."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def generator(*parts: int) -> torch.Generator:
    """A private CPU generator for a key."""
    # torch's Mersenne twister takes the lower 32 bits of a seed only: hand it mixed ones.
    return torch.Generator("cpu").manual_seed(mix(*parts) >> 32)


def _signs_table() -> Tensor:
    values, places = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
    return (2 * ((values.unsqueeze(1) >> places) & 1) - 1).float()  # (256, 8)


_SIGNS = _signs_table()


def fill(kind: Kind, count: int, size: int, source: torch.Generator) -> Tensor:
    """``count`` rows of ``size`` unit noise values, continuing the generator.

    For Gaussian and Rademacher noise two calls for m and n rows give what one call for m + n
    rows gives.
    """
    if kind == "rademacher":
        words = -(-size // 64)
        bits = torch.empty(count, words, dtype=torch.int64, device="cpu")
        bits.random_(-(2**63), None, generator=source)
        rows = _SIGNS.index_select(0, bits.view(torch.uint8).flatten().long())
        return rows.view(count, words * 64)[:, :size]
    padded = -(-size // _BLOCK) * _BLOCK
    # Neither the type nor the device that the user made the default may change the noise.
    rows = torch.empty(count, padded, dtype=torch.float32, device="cpu")
    return rows.normal_(generator=source)[:, :size]


def orthogonalise(rows: Tensor) -> Tensor:
    """Turn Gaussian rows into orthogonal ones of length sqrt(d), in blocks of d rows."""
    size = rows.size(1)
    blocks = []
    for block in rows.double().split(size):
        q, r = torch.linalg.qr(block.T)
        blocks.append(((q * r.diagonal().sign()) * size**0.5).T)
    return torch.cat(blocks).to(rows.dtype)


class NoiseStream:
    """Draws for the rows of a group's queries, asked for in the order of points and draws.

    Args:
        kind: Which noise.
        key: (seed, step, group).
        ids: Identity of every point of the batch: data set index, or place in the batch.
        draws: How many draws each point makes in all (orthogonal noise needs to know).
        size: Number of noise values per row.
    """

    def __init__(
        self, kind: Kind, key: tuple[int, ...], ids: list[int], draws: list[int], size: int
    ) -> None:
        self._kind, self._key, self._ids, self._draws, self._size = kind, key, ids, draws, size
        self._point, self._position = -1, 0
        self._source = torch.Generator("cpu")
        self._rows = torch.empty(0)

    def take(self, point: int, first: int, count: int) -> Tensor:
        """Draws first, ..., first + count - 1 of a point."""
        if self._kind == "orthogonal":
            if point != self._point:  # a point may span many chunks
                gaussian = fill("gaussian", self._draws[point], self._size, self._seed(point))
                self._rows, self._point = orthogonalise(gaussian), point
            return self._rows[first : first + count]
        if point != self._point or first < self._position:
            self._source, self._point, self._position = self._seed(point), point, 0
        if first > self._position:  # somebody else runs the draws in between
            fill(self._kind, first - self._position, self._size, self._source)
        self._position = first + count
        return fill(self._kind, count, self._size, self._source)

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of the rows (point, draw); a point's draws must be consecutive."""
        segments = []
        starts = [0, *(torch.nonzero(points.diff()).flatten() + 1).tolist(), len(points)]
        for begin, end in pairwise(starts):
            if end > begin:
                first = int(draws[begin])
                segments.append(self.take(int(points[begin]), first, end - begin))
        return torch.cat(segments)  # (rows, size)

    def _seed(self, point: int) -> torch.Generator:
        return generator(*self._key, self._ids[point])
