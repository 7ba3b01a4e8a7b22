"""Random words made on a device from a few integers: SplitMix64 as a counter-based hash.

Word c of the sequence (k, gamma), gamma odd, is

    x = k + c gamma,    x = (x ^ x >> 30) m1,    x = (x ^ x >> 27) m2,    word = x ^ x >> 31

modulo 2^64, with logical shifts. Each key has a gamma of its own, so that no sequence is a part of
another. All of it is integer arithmetic: words are the same on every device and machine.

Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
TRANSITIONS = 24  # fewer changes from bit to bit make a gamma under which words look alike

Sequence = tuple[int, int]
"""Where a sequence starts, and its gamma."""


def mixed(x: int) -> int:
    """The hash of one integer, modulo 2^64."""
    x &= MASK
    x = (x ^ x >> 30) * M1 & MASK
    x = (x ^ x >> 27) * M2 & MASK
    return x ^ x >> 31


def sequence(key: int) -> Sequence:
    """That of a 64-bit key."""
    gamma = mixed(key + PHI) | 1
    if (gamma ^ gamma >> 1).bit_count() < TRANSITIONS:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return key, gamma


def advanced(sequence: Sequence, count: int) -> Sequence:
    """The rest of a sequence behind its first ``count`` words; as signed 64-bit integers."""
    start, gamma = sequence
    return _signed(start + count * gamma), _signed(gamma)


def words(sequence: Sequence, first: int, count: int, device: torch.device) -> Tensor:
    """Words first, ..., first + count - 1 of a sequence, shape (count,)."""
    start, gamma = advanced(sequence, first)
    places = torch.arange(count, dtype=torch.int64, device=device)
    return _mix(places.mul_(gamma).add_(start))


def row_words(sequences: Tensor, count: int) -> Tensor:
    """The first words of many sequences, shape (rows, count).

    Args:
        sequences: One a row, signed, shape (rows, 2), on the device where words are made.
        count: Words of each.
    """
    places = torch.arange(count, dtype=torch.int64, device=sequences.device)
    return _mix((places * sequences[:, 1:]).add_(sequences[:, :1]))


def _mix(x: Tensor) -> Tensor:
    _fold(x, 30).mul_(_signed(M1))
    _fold(x, 27).mul_(_signed(M2))
    return _fold(x, 31)


def _fold(x: Tensor, bits: int) -> Tensor:
    """In place x ^ x >> bits; torch's shift of int64 copies the sign, which is masked."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(word: int) -> int:
    """The int64 that has the lower 64 bits of a word."""
    return (word + (1 << 63) & MASK) - (1 << 63)
