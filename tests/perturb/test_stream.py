"""The stream is the documented one: against plain Python, and against numbers written down."""

from __future__ import annotations

import pytest
import torch

from flops.perturb import splitmix
from flops.perturb.random import KINDS, NoiseStream, cpu_words, mix, sequence
from tests.support.noise import hashed, key_of, noise, pcg64dxsm, quantiles

KEYS = [(0,), (7, 3, 1), (-1, 2**70, 5), (123, 0, 0, 9)]
SOURCES = {"cpu": pcg64dxsm, "device": hashed}
CPU = torch.device("cpu")


@pytest.mark.parametrize("first", [0, 1, 37])
@pytest.mark.parametrize("key", KEYS)
def test_keys_and_words_are_the_documented_ones(key: tuple[int, ...], first: int) -> None:
    name = mix(*key)
    assert name == key_of(*key)
    expected = [word for word, _ in zip(pcg64dxsm(name), range(first + 50), strict=False)][first:]
    assert cpu_words(name, first).random_raw(50).tolist() == expected
    expected = [word for word, _ in zip(hashed(name), range(first + 50), strict=False)][first:]
    found = splitmix.device_words(sequence(name), first, 50, CPU)
    assert [word % 2**64 for word in found.tolist()] == expected


def test_numbers_written_down() -> None:
    """Whoever changes the stream changes the results of every run: it must be on purpose."""
    key = key_of(7, 3, 1)
    assert hex(key) == "0x734cba89073e1c1b"
    cpu, device = pcg64dxsm(key), hashed(key)
    assert [hex(next(cpu)) for _ in range(2)] == ["0x4c2add8d2ba53de0", "0xe2ce41888e05711b"]
    assert [hex(next(device)) for _ in range(2)] == ["0xd1a71657e80d9326", "0x4d7fd2ade52df23e"]
    assert quantiles()[65535] == pytest.approx(4.324963, abs=1e-6)
    assert noise("gaussian", (7, 3, 1), 1, 4)[0].tolist() == pytest.approx(
        [-0.700830, -0.952224, 1.105104, -0.531542], abs=1e-6
    )
    assert noise("rademacher", (7, 3, 1), 1, 8)[0].tolist() == [-1, -1, -1, -1, -1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 5, 64, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_point_are_the_documented_ones(kind: str, size: int, path: str) -> None:
    """Also of blocks of orthogonal draws that are full, and of one that is not."""
    draws = [3, 0, 7, 1]
    stream = NoiseStream(kind, (7, 3, 1), [4, 0, 9, 2], draws, size)
    for point, (name, count) in enumerate(zip([4, 0, 9, 2], draws, strict=True)):
        if count:
            found = stream.take(point, 0, count).double()
            expected = noise(kind, (7, 3, 1, name), count, size, SOURCES[path])
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
