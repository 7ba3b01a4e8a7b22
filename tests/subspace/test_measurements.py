"""Measurements in blocks: every isotropic draw once, with its own noise, whatever the size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flops.perturb.random import NoiseStream
from flops.subspace.basis import Grid
from flops.subspace.measurements import Isotropic, _cut
from tests.support.shaped_cases import case

FITTED, BLOCK = 512, 4_000_000


def test_blocks_hold_every_draw_with_its_noise() -> None:
    of = case(iso=(3, 0, 4, 1))
    assert of.measurements.fitted.tolist() == [3, 0, 4, 1]
    seen = []
    for points, real, noise in of.measurements.blocks():
        assert noise.shape == (*real.shape, 16)
        for place, j in enumerate(points.tolist()):
            n = int(of.design.iso[j])
            assert real[place].tolist() == [True] * n + [False] * (real.size(1) - n)
            torch.testing.assert_close(noise[place, :n], of.isotropic(j))
            assert not noise[place, n:].any()
            seen.append(j)
    assert seen == [3, 0, 2]  # by their numbers of draws
    assert list(of.measurements.unfitted()) == []


def test_draws_beyond_the_fit_come_apart() -> None:
    of = case(iso=(3, FITTED + 2, 4, FITTED + 1))
    assert of.measurements.fitted.tolist() == [3, FITTED, 4, FITTED]
    ((points, draws, noise),) = of.measurements.unfitted()
    assert points.tolist() == [1, 1, 3]
    assert draws.tolist() == [FITTED, FITTED + 1, FITTED]
    expected = [of.isotropic(1)[FITTED:], of.isotropic(3)[FITTED:]]
    torch.testing.assert_close(noise, torch.cat(expected))


@pytest.mark.parametrize(
    ("counts", "dimensions", "slices"),
    [
        ([], 10, []),
        ([2, 3, 5, 9], 10, [4]),
        ([1, 1, 1, 1, 1], BLOCK // 4, [4, 1]),  # of a block's noise
        ([1, 1, 1, 1], BLOCK // 4 + 1, [3, 1]),
        ([1, 1, 1, 2, 2], BLOCK // 4, [3, 2]),
        ([BLOCK, BLOCK], 1, [1, 1]),  # a point is never split
        ([1000, 1000, 1000, 1000, 1000], 1, [4, 1]),  # of a kernel
        ([1, 1, 3], BLOCK // 16 // 9 + 1, [2, 1]),  # mostly padding
        ([1, 1, 3], BLOCK // 16 // 9 - 1, [3]),  # but small
        ([1, 1, 2], BLOCK // 16, [3]),  # no more than twice as many
    ],
)
def test_blocks_are_bounded(counts: list[int], dimensions: int, slices: list[int]) -> None:
    order = torch.arange(len(counts))
    found = list(_cut(order, torch.tensor(counts, dtype=torch.long), dimensions))
    assert [len(part) for part in found] == slices
    assert torch.equal(torch.cat([order[:0], *found]), order)


@pytest.mark.parametrize("channels", [16, BLOCK // 4, BLOCK])
def test_noise_is_the_same_whether_it_is_kept_or_made_again(channels: int) -> None:
    space = replace(case().space, grids=(Grid(0, 1, channels),), dtype=torch.float32)
    iso = torch.tensor([2, 0, 1, 1])
    noise = Isotropic(space, iso)
    points, draws = torch.tensor([0, 0, 2, 3]), torch.tensor([0, 1, 0, 0])
    stream = NoiseStream("gaussian", space.key, space.ids, iso.tolist(), channels, space.device)
    expected = stream.rows(points, draws).float()
    assert len(noise._kept) == (4 if channels <= BLOCK // 4 else 0)
    for _ in range(2):
        assert torch.equal(noise.rows(points, draws), expected)
        assert torch.equal(noise.rows(points[1:2], draws[1:2]), expected[1:2])
