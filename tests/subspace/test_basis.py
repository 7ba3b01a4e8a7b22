"""The basis: lifting and coordinates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flops.perturb.activations import Site
from flops.subspace.basis import NARROW, Grid, grid
from flops.subspace.moments import Change, Factor, Moments, leading

DENSE = 2048  # longest axis with a full matrix
LEADING = 256  # directions


def random_moments(grids: list[Grid]) -> list[Moments]:
    found = []
    for g in grids:
        both = []
        for n in (g.positions, g.channels):
            m = torch.randn(n, n).double()
            both.append(Factor(m @ m.T, torch.zeros(n, 0), torch.zeros(0), 0.0))
        found.append(Moments(*both))
    return found


@pytest.mark.parametrize("channels_first", [True, False])
def test_lift_and_coordinates_are_adjoint(channels_first: bool) -> None:
    grids = [Grid(0, 3, 4, channels_first), Grid(12, 1, 5, False)]
    directions = leading(grids, random_moments(grids), 6)
    assert directions.size == 17
    c, z = torch.randn(2, directions.size).double(), torch.randn(2, 17).double()
    torch.testing.assert_close(directions.coordinates(directions.lift(c)), c)  # orthonormal
    left, right = (directions.lift(c) * z).sum(1), (c * directions.coordinates(z)).sum(1)
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(
        directions.rows(torch.arange(17)), directions.lift(torch.eye(17).double())
    )
    assert float(directions.energy.sum()) == pytest.approx(1)
    assert directions.energy.tolist() == sorted(directions.energy.tolist(), reverse=True)


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("channels", [1, NARROW, NARROW + 1])
def test_few_channels_share_a_product_with_the_same_result(
    channels: int, channels_first: bool
) -> None:
    g = Grid(0, 20, channels, channels_first)
    basis = leading([g], random_moments([g]), g.size)
    rows, (u,), (v,) = torch.randn(3, g.size).double(), basis.positions, basis.channels
    full = torch.einsum("pk,npc,cl->nkl", u, g.cut(rows), v)
    torch.testing.assert_close(basis.coordinates(rows), full[:, basis.row, basis.column])
    torch.testing.assert_close(basis.lift(basis.coordinates(rows)), rows)


def sketch(size: int, values: list[float], trace: float) -> Factor:
    """The leading eigenpairs of an axis, along its first coordinates."""
    eye = torch.eye(size).double()[:, : len(values)]
    return Factor(None, eye, torch.tensor(values).double(), trace)


def test_energies_of_sketches_are_shares_of_their_traces() -> None:
    """What a sketch leaves out has its part of the whole, and no direction of its own."""
    grids = [Grid(0, 6, 4), Grid(24, 1, 3)]
    one = Factor(torch.ones(1, 1).double(), torch.zeros(1, 0), torch.zeros(0), 0.0)
    moments = [
        Moments(sketch(6, [3.0, 1.0], 6.0), sketch(4, [4.0, 2.0], 7.0)),  # of 10 in all
        Moments(
            one,
            Factor(
                torch.diag(torch.tensor([2.0, 1.0, 0.0])).double(),
                torch.zeros(3, 0),
                torch.zeros(0),
                0.0,
            ),
        ),
    ]
    found = leading(grids, moments, 0)
    # (3/6, 1/6) x (4, 2) and 1 x (2, 1, 0), over 7 + 3.
    expected = sorted([2, 1, 4 / 6, 2 / 6, 2, 1, 0], reverse=True)
    assert found.energy.tolist() == pytest.approx([e / 10 for e in expected], abs=1e-12)
    assert found.rest == pytest.approx((10 - sum(expected)) / 10 / (27 - 7), rel=1e-12)


def test_without_moments_all_directions_are_alike() -> None:
    grids = [Grid(0, 2, 3), Grid(6, 1, 2)]
    found = leading(grids, [Moments.empty(g, torch.float64) for g in grids], 0)
    assert found.energy.tolist() == pytest.approx([1 / 8] * 8)
    assert found.rest == 0


def test_a_change_is_its_matrix() -> None:
    """plus^T plus - minus^T minus - floor I + V diag(cover) V^T."""
    plus, minus, vectors = (torch.randn(n, 5).double() for n in (7, 3, 5))
    cover = torch.rand(5).double()
    change = Change(plus, minus, 0.3, vectors, cover)
    matrix = plus.T @ plus - minus.T @ minus - 0.3 * torch.eye(5).double()
    matrix += vectors @ torch.diag(cover) @ vectors.T
    x = torch.randn(5, 2).double()
    torch.testing.assert_close(change.times(x), matrix @ x)
    square = Change(plus, minus, 0.3, torch.linalg.qr(vectors).Q, cover)
    full = square.times(torch.eye(5).double())
    assert square.trace() == pytest.approx(float(full.diagonal().sum()))
    old = torch.randn(5, 5).double()
    moment = Factor(old, torch.zeros(5, 0), torch.zeros(0), 0.0).updated(0.7, change, 1)
    torch.testing.assert_close(moment.matrix, 0.7 * old + matrix)


def test_eigenpairs_and_what_a_sketch_leaves() -> None:
    matrix = torch.diag(torch.tensor([3.0, -1.0, 2.0])).double()
    vectors, values, rest = Factor(matrix, torch.zeros(3, 0), torch.zeros(0), 0.0).eigenpairs()
    assert values.tolist() == [0, 2, 3]  # no negative energy
    torch.testing.assert_close(vectors.abs() @ vectors.abs().T, torch.eye(3).double())
    assert rest == 0
    assert sketch(6, [3.0, 1.0], 6.0).eigenpairs()[2] == pytest.approx(2 / 4)
    assert sketch(6, [3.0, 1.0], 3.0).eigenpairs()[2] == 0
    assert Factor.empty(DENSE, torch.float32).matrix is not None
    assert Factor.empty(DENSE + 1, torch.float32).matrix is None
    assert Factor.empty(3, torch.double).size == 3


def test_at_least_so_many_directions_have_energies_of_their_own() -> None:
    grids = [Grid(0, 1, LEADING + 50)]
    weights = torch.arange(LEADING + 50, 0, -1).double()
    one = Factor(torch.ones(1, 1).double(), torch.zeros(1, 0), torch.zeros(0), 0.0)
    channels = Factor(torch.diag(weights), torch.zeros(LEADING + 50, 0), torch.zeros(0), 0.0)
    for most, size in ((0, LEADING), (LEADING + 7, LEADING + 7), (999, LEADING + 50)):
        found = leading(grids, [Moments(one, channels)], most)
        assert found.size == size
        shares = weights / weights.sum()
        torch.testing.assert_close(found.energy, shares[:size])
        left = LEADING + 50 - size
        expected = float(shares[size:].sum()) / left if left else 0
        assert found.rest == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("channels_first", [True, False])
def test_a_grid_is_cut_out_and_pasted(channels_first: bool) -> None:
    g, rows = Grid(3, 2, 4, channels_first), torch.arange(24.0).view(2, 12)
    part = g.cut(rows)
    assert part.shape == (2, 2, 4)
    for n, position, channel in ((0, 1, 2), (1, 0, 3)):
        place = channel * 2 + position if channels_first else position * 4 + channel
        assert part[n, position, channel] == rows[n, 3 + place]
    pasted = torch.zeros(2, 12)
    g.paste(pasted, part)
    assert torch.equal(pasted[:, 3:11], rows[:, 3:11])
    assert not pasted[:, :3].any()
    assert not pasted[:, 11:].any()


@pytest.mark.parametrize(
    ("shape", "convolution", "expected"),
    [
        ((7,), False, (1, 7, False)),
        ((5, 7), False, (5, 7, False)),  # tokens
        ((5, 7), True, (7, 5, True)),
        ((3, 4, 5), False, (20, 3, True)),  # images
        ((2, 3, 4, 5), False, (60, 2, True)),
    ],
)
def test_positions_and_channels_of_a_site(
    shape: tuple[int, ...], convolution: bool, expected: tuple[int, int, bool]
) -> None:
    leaf: Any = None
    found = grid(Site(0, 0, leaf, 9, math.prod(shape), shape), convolution)
    assert (found.positions, found.channels, found.channels_first) == expected
    assert (found.offset, found.size, found.aligned) == (9, math.prod(shape), True)
