"""Keyed noise: every draw follows from (seed, step, group, point) and is never stored.

A point's draws follow each other from its key, so they are the same for any chunk size, any
number of processes and, with data set indices, any order of the points. All generators are
private; the global random state is never touched.

Rows are unit noise with E[z z^T] = I; estimators scale by sigma.

- gaussian: z ~ N(0, I), from 16 random bits a value: one of 65,536 normal quantiles, scaled to
  unit variance (fourth moment 2.999, sixth 14.97, largest value 4.3). Noise at every layer costs
  as much as the passes themselves with torch's own normals, and less than half of that in this way.
- rademacher: independent signs.
- orthogonal: directions of one point mutually orthogonal, of length sqrt(d), uniformly random.
  Once a point has d draws their mean of z z^T is the identity, so the estimate is exact for a
  linear loss.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

Kind = Literal["gaussian", "rademacher", "orthogonal"]
SharedKind = Literal["gaussian", "rademacher"]
KINDS: tuple[str, ...] = get_args(Kind)

_WORDS = 1 << 14  # random words at a time: more would leave the cache
COMPACT = 1 << 21  # noise values of a chunk, 8 MB, from which on their bits are kept instead
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


class _Key(ISeedSequence):
    """Seeds a source: numpy's own hash of a seed takes longer than a small module's noise."""

    def __init__(self, key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """The key, and words that follow from it; the source stirs them before it starts."""
        state = [(self._key + i * 0x9E3779B97F4A7C15) & _MASK for i in range(n_words)]
        return np.array(state, dtype=np.uint64).astype(dtype, copy=False)


def words(*parts: int) -> np.random.SFC64:
    """A private source of 64-bit random words for a key."""
    return np.random.SFC64(_Key(mix(*parts)))  # type: ignore[arg-type] # numpy's stub is narrower


def _signs_table() -> Tensor:
    values, places = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
    return (2 * ((values.unsqueeze(1) >> places) & 1) - 1).float()  # (256, 8)


def _normals_table() -> Tensor:
    places = torch.arange(1 << 16, dtype=torch.float64, device="cpu")
    quantiles = torch.special.ndtri((places + 0.5) / (1 << 16))
    scaled: Tensor = quantiles * float(quantiles.square().mean()) ** -0.5
    return scaled.float()  # (65536,)


_SIGNS, _NORMALS = _signs_table(), _normals_table()


def width(kind: Kind, size: int) -> int:
    """Values that a row of ``size`` takes up while it is made."""
    if kind == "orthogonal":
        return size
    block = 64 if kind == "rademacher" else 4  # values of a word: rows begin with a new one
    return -(-size // block) * block


def fill(
    kind: Kind, count: int, size: int, source: np.random.SFC64, out: Tensor | None = None
) -> Tensor:
    """``count`` rows of ``size`` unit noise values, continuing the source.

    For Gaussian and Rademacher noise two calls for m and n rows give what one call for m + n
    rows gives.

    Args:
        kind: Gaussian or Rademacher.
        count: Rows.
        size: Values of a row.
        source: Of random words.
        out: Where to write them, of shape (count, `width`), contiguous. Of type int16 it takes the
            bits of Gaussian noise, of which `values` makes the same noise.
    """
    if out is None:
        # Neither the type nor the device that the user made the default may change the noise.
        out = torch.empty(count, width(kind, size), dtype=torch.float32, device="cpu")
    signs = kind == "rademacher"
    if out.dtype == torch.int16:
        for part in out.view(-1).split(_WORDS * 4):
            part.copy_(torch.from_numpy(source.random_raw(len(part) // 4).view(np.int16)))
        return out[:, :size]
    table, rows = (_SIGNS, out.view(-1, 8)) if signs else (_NORMALS, out.view(-1))
    piece = np.uint8 if signs else np.uint16
    for part in rows.split(_WORDS * 8 // piece().itemsize):
        raw: np.ndarray = source.random_raw(len(part) * piece().itemsize // 8)
        index = torch.from_numpy(raw.view(piece).astype(np.int32))
        torch.index_select(table, 0, index, out=part)
    return out[:, :size]


def values(noise: Tensor, begin: int, end: int) -> Tensor:
    """Columns of noise, looked up where only its bits are kept."""
    part = noise[:, begin:end]
    if noise.dtype != torch.int16:
        return part
    out = torch.empty(part.shape, dtype=torch.float32, device="cpu")
    rows = max(1, 4 * _WORDS // max(1, end - begin))
    for bits, place in zip(part.split(rows), out.split(rows), strict=True):
        index = bits.to(torch.int32).bitwise_and_(0xFFFF).view(-1)
        torch.index_select(_NORMALS, 0, index, out=place.view(-1))
    return out


def negative(noise: Tensor) -> Tensor:
    """The opposite draws: the table is symmetric, so the bits of -z are those of z inverted."""
    return noise.bitwise_not() if noise.dtype == torch.int16 else -noise


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
        self._source = words()
        self._rows, self._kept = torch.empty(0), torch.empty(0)

    def take(self, point: int, first: int, count: int, out: Tensor | None = None) -> Tensor:
        """Draws first, ..., first + count - 1 of a point, in ``out`` where they can be."""
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
        return fill(self._kind, count, self._size, self._source, out)

    def rows(self, points: Tensor, draws: Tensor, out: Tensor | None = None) -> Tensor:
        """Noise of the rows (point, draw), shape (rows, size); a point's must be consecutive."""
        if out is None:
            out = self._buffer(len(points))
        starts = [0, *(torch.nonzero(points.diff()).flatten() + 1).tolist(), len(points)]
        for begin, end in pairwise(starts):
            if end > begin:
                part = out[begin:end]
                found = self.take(int(points[begin]), int(draws[begin]), end - begin, part)
                if found.data_ptr() != part.data_ptr():
                    part[:, : self._size] = found
        return out[: len(points), : self._size]

    def buffered(self, points: Tensor, draws: Tensor, compact: bool = True) -> Tensor:
        """As `rows`, in a buffer of the stream's own: use it before the next call.

        By one thread: others would wait for those of torch, which spin between two passes. Many
        values come as bits, for `values`, unless ``compact`` is False: half the memory, and each
        value is looked up twice.
        """
        compact = compact and self._kind == "gaussian" and len(points) * self._size > COMPACT
        dtype = torch.int16 if compact else torch.float32
        if len(self._kept) < len(points) or self._kept.dtype != dtype:
            self._kept = self._buffer(len(points), dtype)
        return self.rows(points, draws, self._kept[: len(points)])

    def forget(self) -> None:
        """Let the buffer go."""
        self._kept = torch.empty(0)

    def _buffer(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, width(self._kind, self._size), dtype=dtype, device="cpu")

    def _seed(self, point: int) -> np.random.SFC64:
        return words(*self._key, self._ids[point])
