"""The moments after a step, against sums of outer products written out.

Each axis is learned with weights of the other's directions, in proportion to its moment so far.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flops.subspace.moments import Factor, Moments, learn
from flops.subspace.regression import regress
from tests.support.shaped_cases import SIZE, Case, case

KINDS = pytest.mark.parametrize("masked", [False, True])
PREDICTED = pytest.mark.parametrize("predicted", [False, True])


def dense(of: Case) -> list[Moments]:
    """The moments so far as matrices, so that all of a change is seen."""
    found = []
    for s, (m, g) in enumerate(zip(of.moments, of.space.grids, strict=True)):
        v, one = of.known.channels[s], torch.eye(g.channels).double()
        matrix = (v * torch.linspace(0.4, 2.0, v.size(1)).double()) @ v.T + 0.3 * (one - v @ v.T)
        found.append(replace(m, channels=replace(m.channels, matrix=matrix)))
    return found


def weights(factor: Factor | None, size: int) -> tuple[Tensor, Tensor]:
    """Weights by a moment, whose mean over its signal is 1, and their root; 1 without data."""
    one = torch.eye(size).double()
    if factor is None or factor.matrix is None or not factor.matrix.any():
        return one, one
    values, vectors = torch.linalg.eigh(factor.matrix)
    values = values.clamp(min=0)
    of = 0.25 + 0.75 * values / values.max()
    of = of * values.sum() / (of * values).sum()
    return (vectors * of) @ vectors.T, (vectors * of.sqrt()) @ vectors.T


def parts_of(of: Case, j: int, truth: Tensor) -> tuple[Tensor, Tensor, float]:
    """Measured part of a gradient, isotropic estimate of the rest, mean squared residual."""
    u = of.directions[of.measurements.measured[j]]
    inside = truth @ u.T @ u
    if of.measurements.predicted is not None:
        along = of.measurements.predicted[j]
        inside = inside + (truth @ along) * along
    z = of.isotropic(j) * of.mask[j]
    r = z @ (truth - inside)
    return inside, r @ (z - z @ u.T @ u) / len(z), float(r.square().mean())


def changes(of: Case, truths: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Change of the moments of each site, over positions and over channels.

    Args:
        of: The step.
        truths: Gradients of each point that are learned from, shape (several, dimensions).
    """
    found = [
        (
            torch.zeros(g.positions, g.positions).double(),
            torch.zeros(g.channels, g.channels).double(),
        )
        for g in of.space.grids
    ]
    for j, several in enumerate(truths):
        n = int(of.design.iso[j])
        parts = [parts_of(of, j, truth) for truth in several]
        energy = sum(float(inside.square().sum()) + missed for inside, _, missed in parts)
        for inside, outside, missed in parts:
            # n^2 / energy: inverse variance. E[out out^T] = (1 + 1/n) g g^T + |g|^2 / n.
            weight, floor = n**2 / energy, n**2 / energy * n / (n + 1) * missed / n
            for s, (g, (rows, columns)) in enumerate(zip(of.space.grids, found, strict=True)):
                a, b = (g.cut(x.unsqueeze(0))[0] for x in (inside + outside, outside))
                before = dense(of)[s]
                along, root_along = weights(before.positions, g.positions)
                across, root_across = weights(before.channels, g.channels)
                used = float(g.cut(of.mask[j : j + 1])[0, :, 0].sum())
                covered = [
                    i
                    for i in range(of.known.size)
                    if of.measurements.measured[j, i] and int(of.known.site[i]) == s
                ]
                c, d = root_along @ a, root_along @ b
                columns += weight * (c.T @ c - d.T @ d / (n + 1))
                columns -= floor * used * along.diagonal().mean() * torch.eye(g.channels).double()
                c, d = a @ root_across, b @ root_across
                rows += weight * (c @ c.T - d @ d.T / (n + 1))
                rows -= floor * across.trace() * torch.eye(g.positions).double()
                for i in covered:
                    v = of.known.channels[s][:, of.known.column[i]]
                    w = of.known.positions[s][:, of.known.row[i]]
                    columns += floor * (w @ along @ w) * torch.outer(v, v)
                    rows += floor * (v @ across @ v) * torch.outer(w, w)
    return found


def check(of: Case, learned: list[Moments], truths: list[Tensor], keep: float) -> None:
    for m, before, (rows, columns) in zip(learned, dense(of), changes(of, truths), strict=True):
        assert m.channels.matrix is not None
        old = before.channels.matrix
        torch.testing.assert_close(m.channels.matrix, keep * old + columns)
        if before.positions is None:
            assert m.positions is None
        else:
            assert m.positions is not None
            torch.testing.assert_close(m.positions.matrix, keep * before.positions.matrix + rows)


@KINDS
@PREDICTED
def test_from_losses(masked: bool, predicted: bool) -> None:
    """The gradient of every point's loss."""
    of = case(masked, predicted)
    step = replace(of.measurements, features=None)
    found = regress(step, 1.0, tune=False)
    learned = learn(step, found, dense(of), 0.9, 3, torch.ones(SIZE))
    check(of, learned, [g.unsqueeze(0) for g in of.gradients], 0.9)


@KINDS
@PREDICTED
def test_from_outputs(masked: bool, predicted: bool) -> None:
    """Gradients that the point would have for the residuals of others."""
    of = case(masked, predicted)
    found = regress(of.measurements, 1.0, tune=False)
    learned = learn(of.measurements, found, dense(of), 0.9, 3, torch.ones(SIZE))
    check(of, learned, [of.view.roots @ jacobian for jacobian in of.jacobians], 0.9)


@pytest.mark.parametrize(("above", "learned_from"), [(1.1, True), (0.9, False)])
def test_ten_times_the_resolution_is_audible(above: float, learned_from: bool) -> None:
    """Of a loss: its rounding over sigma."""
    of = case()
    step = replace(of.measurements, features=None)
    found = regress(step, 1.0, tune=False)
    # Largest loss for which the root of the least energy is just above ten times the resolution.
    least = float(found.energy.min().sqrt()) / 10 * of.space.sigma
    losses = torch.tensor([0.0, -least / above / torch.finfo(torch.double).eps]).double()
    learned = learn(step, found, dense(of), 0.9, 3, losses)
    truths = [g.unsqueeze(0) for g in of.gradients]
    weakest = int(found.energy.argmin())
    if not learned_from:
        truths[weakest] = truths[weakest][:0]
    check(of, learned, truths, 0.9)
