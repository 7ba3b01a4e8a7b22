"""Keyed random numbers: words of a key, and noise that is regenerated from them.

Words have 64 bits. They are generated where they are used, so that only keys are communicated: on
the CPU by numpy's PCG64DXSM, on other devices by SplitMix64 (`flops.perturb.splitmix`). Words of
the CPU and of devices differ; each are equal on all machines. All generators are private; the
global random state is never touched.

Every draw of noise is regenerated from its key (seed, step, group, point, draw), with random
access: any draw of a point, or piece of a parameter's noise, is generated without the others. So it
is equal for any chunk size, any number of ranks and, with data set indices, any order of the
points, and a rank generates only its own draws.

Rows are unit noise with E[z z^T] = I; estimators scale by sigma.

- gaussian: z ~ N(0, I), from 16 random bits a value: one of 65,536 normal quantiles, scaled to
  unit variance (fourth moment 2.999, sixth 14.97, largest value 4.3). With torch's normals, noise
  at every layer costs as much as the passes; this takes less than half of that.
  Large noise may be stored as its 16-bit codes (int16).
- rademacher: independent signs, one for each random bit.
- orthogonal: draws of one point are mutually orthogonal, of norm sqrt(d), uniformly random. With d
  draws the mean of z z^T is the identity, so the estimate is exact for a linear loss.

A 64-bit word holds 4 normals or 64 signs, the lowest bits first; tables are cached on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from flops.perturb import splitmix
from flops.perturb.splitmix import M1, M2, MASK, PHI

Kind = Literal["gaussian", "rademacher", "orthogonal"]
SharedKind = Literal["gaussian", "rademacher"]
KINDS: tuple[str, ...] = get_args(Kind)

CPU, ROW_MAJOR = torch.device("cpu"), torch.contiguous_format
COMPACT = 1 << 21  # noise values of a chunk, 8 MB, above which it is stored as 16-bit codes
CACHED = 1 << 17  # values per lookup on the CPU: more would not fit into the cache
_WORDS = 1 << 15  # random words at a time on the CPU, to stay in the cache
_DEVICE_WORDS = 1 << 20  # on other devices: few launches, and 8 MB
TRANSITIONS = 24  # with fewer bit transitions, gamma makes correlated words


def mixed(x: int) -> int:
    """The hash of one integer, modulo 2^64."""
    x &= MASK
    x = (x ^ x >> 30) * M1 & MASK
    x = (x ^ x >> 27) * M2 & MASK
    return x ^ x >> 31


def mix(*parts: int) -> int:
    """Hash integers to a 64-bit key (SplitMix64), so that neighbouring keys are uncorrelated."""
    state = PHI
    for part in parts:
        state = mixed((state ^ part & MASK) + PHI)
    return state


def generator(*parts: int) -> torch.Generator:
    """A private CPU generator for a key."""
    # torch's Mersenne Twister uses only the lower 32 bits of a seed: give it mixed ones.
    return torch.Generator("cpu").manual_seed(mix(*parts) >> 32)


class _Key(ISeedSequence):
    """Seed of a generator: numpy's own seeding takes longer than a small module's noise."""

    def __init__(self, key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Any:
        """The key, and words derived from it; the generator mixes them before it starts."""
        state = [(self._key + i * PHI) & MASK for i in range(n_words)]
        return np.array(state, dtype=np.uint64).astype(dtype, copy=False)


def cpu_words(key: int, first: int = 0) -> np.random.PCG64DXSM:
    """A private generator of the 64-bit random words first, first + 1, ... of a key."""
    source = np.random.PCG64DXSM(_Key(key))  # type: ignore[arg-type] # numpy's stub is narrower
    return source.advance(first) if first else source


def sequence(key: int) -> splitmix.Sequence:
    """The sequence of a 64-bit key."""
    gamma = mixed(key + PHI) | 1
    if (gamma ^ gamma >> 1).bit_count() < TRANSITIONS:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return key, gamma


def _signs() -> Tensor:
    values, places = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
    return (2 * ((values.unsqueeze(1) >> places) & 1) - 1).float()  # (256, 8)


def _normals() -> Tensor:
    places = torch.arange(1 << 16, dtype=torch.float64, device="cpu")
    quantiles = torch.special.ndtri((places + 0.5) / (1 << 16))
    scaled: Tensor = quantiles * float(quantiles.square().mean()) ** -0.5
    return scaled.float()  # (65536,)


@cache
def table(signs: bool, device: torch.device) -> Tensor:
    """Lookup table of 8-bit groups of signs, or of 16-bit codes of normals."""
    with torch.inference_mode(mode=False):
        return (_signs() if signs else _normals()).to(device)


def look_up(signs: bool, words: np.ndarray | Tensor, out: Tensor) -> None:
    """Write the values of random words, or the codes of normals if ``out`` is int16.

    Args:
        signs: Signs or normals.
        words: 64-bit words, as an array or as a tensor on the device of ``out``.
        out: Flat, contiguous, of the length of all values.
    """
    if out.dtype == torch.int16:
        bits = torch.from_numpy(words.view(np.int16)) if isinstance(words, np.ndarray) else words
        out.copy_(bits.view(-1).view(torch.int16))
        return
    if isinstance(words, np.ndarray):  # half of torch's time for few words
        index = torch.from_numpy(words.view(np.uint8 if signs else np.uint16).astype(np.int32))
    else:
        index = _index(words.view(-1).view(torch.uint8 if signs else torch.int16))
    found = out.view(-1, 8) if signs else out
    torch.index_select(table(signs, out.device), 0, index, out=found)


def values(noise: Tensor, begin: int, end: int) -> Tensor:
    """Columns of noise, looked up if it is stored as codes."""
    part = noise[:, begin:end]
    if noise.dtype != torch.int16:
        return part
    out = torch.empty(part.shape, dtype=torch.float32, device=noise.device)
    size = CACHED if noise.device.type == "cpu" else part.numel()
    rows = max(1, size // max(1, end - begin))
    for bits, place in zip(part.split(rows), out.split(rows), strict=True):
        index = _index(bits).view(-1)
        torch.index_select(table(False, noise.device), 0, index, out=place.view(-1))
    return out


def negative(noise: Tensor) -> Tensor:
    """The negative draws: the table is symmetric, so codes of -z are inverted codes of z."""
    return noise.bitwise_not() if noise.dtype == torch.int16 else -noise


def _index(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).bitwise_and_(0xFFFF)  # torch has few operations on uint16


def signed(z: Tensor, unit: int) -> Tensor:
    """Noise of the rows, given that of the draws; pairs are adjacent."""
    return z if unit == 1 else torch.stack([z, negative(z)], 1).flatten(0, 1)


def native(device: torch.device) -> bool:
    """Whether numpy generates a device's noise."""
    return device.type == "cpu"


def _words_at_once(device: torch.device) -> int:
    return _WORDS if native(device) else _DEVICE_WORDS


def _per_word(kind: Kind) -> int:
    return 64 if kind == "rademacher" else 4


def _width(kind: Kind, size: int) -> int:
    """Buffer length of a row of ``size`` values: every row starts with a new word."""
    block = 1 if kind == "orthogonal" else _per_word(kind)
    return -(-size // block) * block


class _Source:
    """The words of a key from ``first`` on, converted to noise piece by piece."""

    def __init__(self, kind: Kind, key: int, first: int, device: torch.device) -> None:
        self._signs, self._block = kind == "rademacher", _per_word(kind)
        self._first, self._device = first, device
        self._cpu = cpu_words(key, first) if native(device) else None
        self._sequence = sequence(key) if self._cpu is None else (0, 0)

    def write(self, out: Tensor) -> None:
        """Write the next values; ``out`` is flat, and a whole number of words."""
        size = self._block * _words_at_once(self._device)
        for begin in range(0, len(out), size):
            part = out[begin : begin + size] if len(out) > size else out
            look_up(self._signs, self._words(len(part) // self._block), part)

    def _words(self, count: int) -> np.ndarray | Tensor:
        if self._cpu is not None:
            found: np.ndarray = self._cpu.random_raw(count)
            return found
        self._first += count
        return splitmix.device_words(self._sequence, self._first - count, count, self._device)


def noise_pieces(
    kind: SharedKind, key: tuple[int, ...], size: int, device: torch.device, offset: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Values offset, ..., offset + size - 1 of a key's noise, a small piece at a time.

    Yields the start of each piece, from 0 on, and its values (float32, on the device) in a buffer
    of 1 MB on the CPU, 32 MB elsewhere, which the next piece overwrites. A value depends only on
    the key and its position, so pieces at any offsets belong to the same noise.
    """
    if not size:
        return
    first, skip = divmod(offset, _per_word(kind))
    source = _Source(kind, mix(*key), first, device)
    most = min(8 * _words_at_once(device), _width(kind, skip + size))  # whole words
    buffer = torch.empty(most, device=device, dtype=torch.float32)
    done = 0
    while done < size:
        count = min(most - skip, size - done)
        part = buffer[: _width(kind, skip + count)]
        source.write(part)
        yield done, part[skip : skip + count]
        done, skip = done + count, 0


def fill(kind: SharedKind, key: tuple[int, ...], out: Tensor, offset: int = 0) -> Tensor:
    """Overwrite ``out`` with values offset, ..., offset + out.numel() - 1 of a key's noise.

    Args:
        kind: Distribution of the noise.
        key: Integers that identify it.
        out: A tensor or a view of one, of any floating-point type and device, filled in the order
            of its elements.
        offset: Position of its first value in the noise of the key.
    """
    if not out.is_contiguous():
        return out.copy_(fill(kind, key, torch.empty_like(out, memory_format=ROW_MAJOR), offset))
    flat, block, done = out.view(-1), _per_word(kind), 0
    if out.dtype == torch.float32 and offset % block == 0:  # whole words are written in place
        done = len(flat) // block * block
        _Source(kind, mix(*key), offset // block, out.device).write(flat[:done])
    rest = flat[done:]
    for begin, z in noise_pieces(kind, key, len(rest), out.device, offset + done):
        rest[begin : begin + len(z)] = z
    return out


def orthogonalise(rows: Tensor) -> Tensor:
    """Orthogonalise at most d Gaussian rows, with norms sqrt(d)."""
    q, r = torch.linalg.qr(rows.double().T)
    long: Tensor = (q * r.diagonal().sign()).T * float(rows.size(1)) ** 0.5
    return long.to(rows.dtype)


class NoiseStream:
    """Draws for the rows of a group's queries.

    Args:
        kind: Distribution of the noise.
        key: (seed, step, group).
        ids: Identity of every point: data set index, or position in the batch.
        draws: Total number of draws of each point, for orthogonal noise.
        size: Number of noise values per row.
        device: Device of the rows.
    """

    def __init__(
        self,
        kind: Kind,
        key: tuple[int, ...],
        ids: list[int],
        draws: list[int],
        size: int,
        device: torch.device = CPU,
    ) -> None:
        self._kind, self._key, self._ids, self._draws, self._size = kind, key, ids, draws, size
        self._device = device
        self._kept = torch.empty(0)
        self._block, self._rows = (-1, -1), torch.empty(0)  # of orthogonal draws

    def take(self, point: int, first: int, count: int, out: Tensor | None = None) -> Tensor:
        """Draws first, ..., first + count - 1 of a point, in ``out`` if given."""
        out = self._buffer(count) if out is None else out
        if self._kind == "orthogonal":
            for begin in range(first - first % self._size, first + count, self._size):
                low, high = max(first, begin), min(first + count, begin + self._size)
                rows = self._orthogonal(point, begin)
                out[low - first : high - first] = rows[low - begin : high - begin]
        else:
            words = out.size(1) // _per_word(self._kind)
            _Source(self._kind, self._hash(point), first * words, self._device).write(out.view(-1))
        return out[:, : self._size]

    def rows(self, points: Tensor, draws: Tensor, out: Tensor | None = None) -> Tensor:
        """Noise of the rows (point, draw), shape (rows, size); fastest if draws are consecutive."""
        out = self._buffer(len(points)) if out is None else out
        if native(self._device) or self._kind == "orthogonal":
            breaks = (points.diff() != 0) | (draws.diff() != 1)
            starts = [0, *(torch.nonzero(breaks).flatten() + 1).tolist(), len(points)]
            for begin, end in pairwise(starts):
                if end > begin:
                    self.take(int(points[begin]), int(draws[begin]), end - begin, out[begin:end])
        else:
            self._hashed(points.tolist(), draws.tolist(), out)
        return out[:, : self._size]

    def buffered(self, points: Tensor, draws: Tensor, compact: bool = True) -> Tensor:
        """Like `rows`, in a buffer that the next call overwrites.

        Single-threaded: other threads would compete with torch's, which spin between passes. Large
        chunks are 16-bit codes, for `values`, unless ``compact`` is False: half the memory, but
        each value is looked up twice.
        """
        compact = compact and self._kind == "gaussian" and len(points) * self._size > COMPACT
        dtype = torch.int16 if compact else torch.float32
        if len(self._kept) < len(points) or self._kept.dtype != dtype:
            self._kept = self._buffer(len(points), dtype)
        return self.rows(points, draws, self._kept[: len(points)])

    def forget(self) -> None:
        """Free the buffer."""
        self._kept = torch.empty(0)

    def _hashed(self, points: list[int], draws: list[int], out: Tensor) -> None:
        """All rows at once: a kernel launch costs more than a point's noise."""
        words = out.size(1) // _per_word(self._kind)
        known = {point: sequence(self._hash(point)) for point in set(points)}
        rows = [
            splitmix.advanced(known[point], draw * words)
            for point, draw in zip(points, draws, strict=True)
        ]
        sent = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2).to(self._device)
        most = max(1, _DEVICE_WORDS // max(1, words))
        for part, place in zip(sent.split(most), out.split(most), strict=True):
            look_up(self._kind == "rademacher", splitmix.row_words(part, words), place.view(-1))

    def _orthogonal(self, point: int, begin: int) -> Tensor:
        """The block of at most d draws of a point from ``begin`` on."""
        if self._block != (point, begin):  # a block may span many chunks
            count = min(self._size, self._draws[point] - begin)
            gaussian = self._buffer(count, kind="gaussian")
            words = gaussian.size(1) // _per_word("gaussian")
            source = _Source("gaussian", self._hash(point), begin * words, self._device)
            source.write(gaussian.view(-1))
            self._rows = orthogonalise(gaussian[:, : self._size])
            self._block = (point, begin)
        return self._rows

    def _hash(self, point: int) -> int:
        return mix(*self._key, self._ids[point])

    def _buffer(
        self, rows: int, dtype: torch.dtype = torch.float32, kind: Kind | None = None
    ) -> Tensor:
        width = _width(kind or self._kind, self._size)
        return torch.empty(rows, width, dtype=dtype, device=self._device)
