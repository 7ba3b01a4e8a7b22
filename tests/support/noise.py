"""The documented noise stream once more, in plain Python: nothing of flops is used.

A key is hashed by splitmix64, part by part. It seeds SFC64 with (key, key + phi, key + 2 phi), a
counter of 1 and twelve rounds that are thrown away. A row begins with a new 64-bit word; a word
holds 64 signs, the lowest bit first, or four 16-bit indices, the lowest first, into the normal
quantiles (i + 1/2) / 65,536 scaled to unit variance. Orthogonal rows are Gaussian ones after
Gram-Schmidt, of length sqrt(d), in blocks of d.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

MASK = 2**64 - 1
PHI = 0x9E3779B97F4A7C15


def key_of(*parts: int) -> int:
    """One 64-bit key of several integers."""
    state = PHI
    for part in parts:
        z = ((state ^ (part & MASK)) + PHI) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        state = z ^ z >> 31
    return state


def sfc64(key: int) -> Iterator[int]:
    """Random 64-bit words."""
    a, b, c, counter = key, (key + PHI) & MASK, (key + 2 * PHI) & MASK, 1
    while True:
        word = (a + b + counter) & MASK
        if counter > 12:
            yield word
        counter += 1
        a, b, c = b ^ b >> 11, c + (c << 3) & MASK, ((c << 24 | c >> 40) + word) & MASK


@cache
def quantiles() -> list[float]:
    """The 65,536 values of Gaussian noise, rounded to single precision."""
    raw = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)]
    scale = (sum(x * x for x in raw) / 65536) ** -0.5
    return torch.tensor([x * scale for x in raw], dtype=torch.float32).tolist()


def noise(kind: str, key: tuple[int, ...], count: int, size: int) -> Tensor:
    """The first rows of a key's stream, in double precision, shape (count, size)."""
    if kind == "orthogonal":
        return gram_schmidt(noise("gaussian", key, count, size))
    words, rows = sfc64(key_of(*key)), []
    for _ in range(count):
        row: list[float] = []
        while len(row) < size:
            word = next(words)
            if kind == "rademacher":
                row += [2.0 * (word >> bit & 1) - 1 for bit in range(64)]
            else:
                row += [quantiles()[word >> shift & 0xFFFF] for shift in (0, 16, 32, 48)]
        rows.append(row[:size])
    return torch.tensor(rows, dtype=torch.float64).reshape(count, size)


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
