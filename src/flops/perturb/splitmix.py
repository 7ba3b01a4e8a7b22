"""SplitMix64 as a counter-based hash: random words on devices other than the CPU.

Word c of the sequence (k, gamma), gamma odd, is

    x = k + c gamma,    x = (x ^ x >> 30) m1,    x = (x ^ x >> 27) m2,    word = x ^ x >> 31

modulo 2^64, with logical shifts. Each key has its own gamma (`flops.perturb.random.sequence`), so
that no sequence is part of another. All arithmetic is on integers: words are equal on all devices
and machines.

Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1

Sequence = tuple[int, int]
"""Start and gamma of a sequence."""


def advanced(sequence: Sequence, count: int) -> Sequence:
    """The sequence after its first ``count`` words, as signed 64-bit integers."""
    start, gamma = sequence
    return _signed(start + count * gamma), _signed(gamma)


def device_words(sequence: Sequence, first: int, count: int, device: torch.device) -> Tensor:
    """Words first, ..., first + count - 1 of a sequence, shape (count,)."""
    start, gamma = advanced(sequence, first)
    places = torch.arange(count, dtype=torch.int64, device=device)
    return _mix(places.mul_(gamma).add_(start))


def row_words(sequences: Tensor, count: int) -> Tensor:
    """The first words of many sequences, shape (rows, count).

    Args:
        sequences: One per row, signed, shape (rows, 2), on the device of the words.
        count: Words per row.
    """
    places = torch.arange(count, dtype=torch.int64, device=sequences.device)
    return _mix((places * sequences[:, 1:]).add_(sequences[:, :1]))


def _mix(x: Tensor) -> Tensor:
    _fold(x, 30).mul_(_signed(M1))
    _fold(x, 27).mul_(_signed(M2))
    return _fold(x, 31)


def _fold(x: Tensor, bits: int) -> Tensor:
    """In place x ^ x >> bits; torch shifts int64 arithmetically, so the sign bits are masked."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(word: int) -> int:
    """The lower 64 bits of a word as int64."""
    return (word + (1 << 63) & MASK) - (1 << 63)
