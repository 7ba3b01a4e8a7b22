"""Keyed random numbers: 64-bit words of a key, with random access and equal on all machines.

Words are generated where they are used, so that only keys are communicated: on the CPU by numpy's
PCG64DXSM, on other devices by SplitMix64 as a counter-based hash. There, word c of the sequence
(k, gamma), gamma odd, is

    x = k + c gamma,    x = (x ^ x >> 30) m1,    x = (x ^ x >> 27) m2,    word = x ^ x >> 31

modulo 2^64, with logical shifts. Each key has its own gamma, so that no sequence is part of
another. All arithmetic is on integers: words are equal on all devices and machines. Those of the
CPU and of devices differ.

All generators are private; the global random state is never touched.

Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
TRANSITIONS = 24  # with fewer bit transitions, gamma makes correlated words

Sequence = tuple[int, int]
"""Start and gamma of a sequence."""


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


def sequence(key: int) -> Sequence:
    """The sequence of a 64-bit key."""
    gamma = mixed(key + PHI) | 1
    if (gamma ^ gamma >> 1).bit_count() < TRANSITIONS:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return key, gamma


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
