"""The basis: lifting and coordinates."""

from __future__ import annotations

import pytest
import torch

from flops.subspace.basis import NARROW, Factor, Grid, Moments, leading


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
