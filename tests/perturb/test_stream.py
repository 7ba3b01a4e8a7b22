"""The stream is the documented one: against plain Python, and against numbers written down."""

from __future__ import annotations

import pytest
import torch

from flops.perturb.random import KINDS, NoiseStream, mix, words
from tests.support.noise import key_of, noise, quantiles, sfc64

KEYS = [(0,), (7, 3, 1), (-1, 2**70, 5), (123, 0, 0, 9)]


@pytest.mark.parametrize("key", KEYS)
def test_keys_and_words_are_the_documented_ones(key: tuple[int, ...]) -> None:
    assert mix(*key) == key_of(*key)
    source, expected = words(*key), sfc64(key_of(*key))
    assert source.random_raw(50).tolist() == [next(expected) for _ in range(50)]


def test_numbers_written_down() -> None:
    """Whoever changes the stream changes the results of every run: it must be on purpose."""
    assert hex(key_of(7, 3, 1)) == "0x734cba89073e1c1b"
    source = sfc64(key_of(7, 3, 1))
    assert [hex(next(source)) for _ in range(2)] == ["0x605da910050ef462", "0xc6f5a3e6ed7a6cd2"]
    assert quantiles()[65535] == pytest.approx(4.324963, abs=1e-6)
    assert noise("gaussian", (7, 3, 1), 1, 4)[0].tolist() == pytest.approx(
        [1.691503, -2.058908, 0.413581, -0.314882], abs=1e-6
    )
    assert noise("rademacher", (7, 3, 1), 1, 8)[0].tolist() == [-1, 1, -1, -1, -1, 1, 1, -1]


@pytest.mark.parametrize("size", [1, 5, 64, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_point_are_the_documented_ones(kind: str, size: int) -> None:
    """Also of blocks of orthogonal draws that are full, and of one that is not."""
    draws = [3, 0, 7, 1]
    stream = NoiseStream(kind, (7, 3, 1), [4, 0, 9, 2], draws, size)
    for point, (name, count) in enumerate(zip([4, 0, 9, 2], draws, strict=True)):
        if count:
            found = stream.take(point, 0, count).double()
            expected = noise(kind, (7, 3, 1, name), count, size)
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
