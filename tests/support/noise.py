"""The documented noise stream once more, in plain Python: nothing of flops is used.

A key is hashed by splitmix64, part by part. On the CPU it seeds PCG64DXSM with the 128-bit numbers
(key, key + phi) and (key + 2 phi, key + 3 phi), the higher half first; on other devices word c is
splitmix64 of key + c gamma, gamma the key's own odd hash. A row begins with a new 64-bit word; a
word holds 64 signs, the lowest bit first, or four 16-bit indices, the lowest first, into the normal
quantiles (i + 1/2) / 65,536 scaled to unit variance. Orthogonal rows are Gaussian ones after
Gram-Schmidt, of length sqrt(d), in blocks of d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from statistics import NormalDist

import torch
from torch import Tensor

MASK = 2**64 - 1
PHI = 0x9E3779B97F4A7C15


def key_of(*parts: int) -> int:
    """One 64-bit key of several integers."""
    state = PHI
    for part in parts:
        state = splitmix((state ^ (part & MASK)) + PHI)
    return state


def splitmix(z: int) -> int:
    """The hash of SplitMix64."""
    z &= MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def pcg64dxsm(key: int) -> Iterator[int]:
    """Random 64-bit words of the CPU."""
    high, low, stream, rest = ((key + i * PHI) & MASK for i in range(4))
    cheap, wide = 0xDA942042E4DD58B5, 2**128 - 1
    increment = ((stream << 64 | rest) << 1 | 1) & wide
    state = increment + (high << 64 | low)
    state = (state * 0x2360ED051FC65DA44385DF649FCCF645 + increment) & wide
    while True:
        word, odd = state >> 64, state & MASK | 1
        word = (word ^ word >> 32) * cheap & MASK
        yield (word ^ word >> 48) * odd & MASK
        state = (state * cheap + increment) & wide


def hashed(key: int) -> Iterator[int]:
    """Random 64-bit words of every other device."""
    gamma = splitmix(key + PHI) | 1
    if bin(gamma ^ gamma >> 1).count("1") < 24:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    for c in count():
        yield splitmix(key + c * gamma)


@cache
def quantiles() -> list[float]:
    """The 65,536 values of Gaussian noise, rounded to single precision."""
    raw = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)]
    scale = (sum(x * x for x in raw) / 65536) ** -0.5
    return torch.tensor([x * scale for x in raw], dtype=torch.float32).tolist()


def noise(
    kind: str,
    key: tuple[int, ...],
    draws: int,
    size: int,
    source: Callable[[int], Iterator[int]] = pcg64dxsm,
) -> Tensor:
    """The first rows of a key's stream, in double precision, shape (draws, size)."""
    if kind == "orthogonal":
        return gram_schmidt(noise("gaussian", key, draws, size, source))
    words, rows = source(key_of(*key)), []
    for _ in range(draws):
        row: list[float] = []
        while len(row) < size:
            word = next(words)
            if kind == "rademacher":
                row += [2.0 * (word >> bit & 1) - 1 for bit in range(64)]
            else:
                row += [quantiles()[word >> shift & 0xFFFF] for shift in (0, 16, 32, 48)]
        rows.append(row[:size])
    return torch.tensor(rows, dtype=torch.float64).reshape(draws, size)


def gram_schmidt(rows: Tensor) -> Tensor:
    """Orthogonal rows of length sqrt(d), in blocks of d."""
    done: list[Tensor] = []
    for number, row in enumerate(rows):
        block = done[number // rows.size(1) * rows.size(1) :]
        for _ in range(2):  # the second time for rounding
            for one in block:
                row = row - (row @ one) * one
        done.append(row / row.norm())
    return torch.stack(done) * rows.size(1) ** 0.5 if done else rows
