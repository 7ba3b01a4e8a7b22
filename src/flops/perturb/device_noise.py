"""Random words made on a device from a few integers: a counter-based hash.

Word c of a key (k0, k1) is SplitMix64's mix of a Weyl sequence, with the second half of the key in
its middle, so that the sequences of two keys never run into each other:

    x = k0 + c phi,    x = (x ^ x >> 30) m1 ^ k1,    x = (x ^ x >> 27) m2,    word = x ^ x >> 31

modulo 2^64, with logical shifts. All of it is integer arithmetic: the words are the same on every
device and machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(word: int) -> int:
    """The int64 that has the lower 64 bits of a word."""
    return (word + (1 << 63) & (1 << 64) - 1) - (1 << 63)


def start(key: tuple[int, int], first: int) -> tuple[int, int]:
    """All that words first, first + 1, ... of a key depend on: k0 + first phi, and k1."""
    return signed(key[0] + first * PHI), signed(key[1])


def words(key: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """Words first, ..., first + count - 1 of a key, shape (count,)."""
    base, second = start(key, first)
    x = torch.arange(count, dtype=torch.int64, device=device).mul_(signed(PHI)).add_(base)
    return _mixed(x, second)


def row_words(starts: Tensor, count: int) -> Tensor:
    """The first words of every row, shape (rows, count).

    Args:
        starts: The `start` of each row, shape (rows, 2), on the device where words are made.
        count: Words of a row.
    """
    places = torch.arange(count, dtype=torch.int64, device=starts.device).mul_(signed(PHI))
    return _mixed(starts[:, :1] + places, starts[:, 1:])


def _mixed(x: Tensor, second: Tensor | int) -> Tensor:
    _fold(x, 30).mul_(signed(M1)).bitwise_xor_(second)
    return _fold(_fold(x, 27).mul_(signed(M2)), 31)


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^ x >> bits in place; torch's shift of int64 copies the sign, which is masked."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))
