"""Low-rank noise: its factors, pieces of it, and its moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops.perturb import low_rank
from flops.perturb.draws import DrawShape
from flops.perturb.low_rank import LowRank
from flops.perturb.random import fill

KEY = (3, 17, 4, 0)  # seed, step, group, draw


def whole(noise: LowRank, key: tuple[int, ...], matrix: Tensor, number: int = 0) -> Tensor:
    parts = [z.clone() for _, z in noise.pieces(key, number, matrix, 0, matrix.numel())]
    return torch.cat(parts).view(len(matrix), -1)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_noise_is_the_product_of_its_factors(rank: int) -> None:
    z = whole(LowRank(rank, 10), KEY, torch.empty(30, 20))
    u = fill("gaussian", (*KEY, 0), torch.empty(30, rank))
    v = fill("gaussian", (3, 1, 4, 0, 0, 10), torch.empty(20, rank))
    torch.testing.assert_close(z, u @ v.T)
    assert torch.linalg.matrix_rank(z) == rank


@pytest.mark.parametrize("piece", [1, 20, 70, 1 << 18])
def test_any_range_is_a_piece_of_the_same_noise(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, noise = torch.empty(7, 4, 5), LowRank(2, 10)
    expected = whole(noise, KEY, matrix).flatten()
    monkeypatch.setattr(low_rank, "PIECE", piece)
    for first in (0, 1, 20, 33, 139):
        for count in (1, 19, 40, 140 - first):
            if first + count > 140:
                continue
            found = torch.full((count,), torch.nan)
            for begin, z in noise.pieces(KEY, 0, matrix, first, count):
                assert len(z) <= max(piece, 20)
                found[begin : begin + len(z)] = z
            torch.testing.assert_close(found, expected[first : first + count])


def test_the_right_factor_stays_for_an_interval() -> None:
    """V and with it the space of the rows; U is new in every step."""
    noise, matrix = LowRank(2, 5), torch.empty(12, 9)

    def rows(step: int, draw: int = 0) -> Tensor:
        return whole(noise, (3, step, 4, draw), matrix)

    assert torch.linalg.matrix_rank(torch.cat([rows(step) for step in range(5)])) == 2
    assert torch.linalg.matrix_rank(torch.cat([rows(4), rows(5)])) == 4
    assert torch.linalg.matrix_rank(torch.cat([rows(0), rows(0, draw=1)])) == 4
    assert torch.linalg.matrix_rank(torch.cat([rows(0), rows(1)], 1)) == 4
    other = whole(noise, (3, 0, 4, 0), matrix, number=1)
    assert torch.linalg.matrix_rank(torch.cat([rows(0), other])) == 4


@pytest.mark.parametrize("rank", [1, 4])
def test_times_its_gain_it_has_the_identity_for_a_second_moment(rank: int) -> None:
    noise, matrix, count = LowRank(rank, 1), torch.empty(3, 4), 8000
    z = torch.stack([whole(noise, (0, step, 0, 0), matrix).flatten() for step in range(count)])
    moment = noise.gain(matrix) * z.T @ z / count
    # Fourth moments of a product are at most 9: standard errors of .035 at most.
    torch.testing.assert_close(moment, torch.eye(12), rtol=0, atol=5 * 3 / count**0.5)
    gained = (noise.gain(matrix) * z).square().sum(1).mean()
    shape = DrawShape((nn.Parameter(matrix),))
    assert float(gained) == pytest.approx(shape.energy(noise), rel=0.1)


def test_vectors_have_plain_noise() -> None:
    shapes = [(5,), (), (1, 6), (6, 1), (1, 2, 3), (4, 6)]
    shape = DrawShape(tuple(nn.Parameter(torch.empty(s)) for s in shapes))
    noise = LowRank(2, 10)
    row = shape.fill(noise, KEY, torch.empty(shape.offsets[-1]))
    plain = fill("gaussian", KEY, torch.empty(shape.offsets[-1]))
    assert torch.equal(row[:-24], plain[:-24])
    assert torch.linalg.matrix_rank(row[-24:].view(4, 6)) == 2
    assert [shape.gain(noise, i) for i in range(6)] == [1, 1, 1, 1, 1, 0.5]
    assert [shape.gain("gaussian", i) for i in range(6)] == [1] * 6
    assert shape.energy(noise) == shape.offsets[-2] + 12
    assert DrawShape(shape.parameters, {5: 0}).energy(noise) == shape.offsets[-2] + 9
