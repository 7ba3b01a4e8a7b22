"""Small steps of shaped noise on linear losses, of which everything can be computed densely.

Two sites, one of them with channels first, the other known only by a sketch; four points with
different numbers of draws; with padding and predicted gradients, or without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.passes.loss_view import LossView
from flops.subspace.basis import Basis, Grid, Space, signed
from flops.subspace.measurements import Design, Measurements
from flops.subspace.moments import Factor, Moments, leading

SIZE, FEATURES = 4, 3
DRAWS, ISO = (7, 5, 6, 8), (3, 2, 4, 3)


@dataclass(frozen=True)
class Case:
    """A step, and the truth behind it.

    Attributes:
        space: Space of the noise, of 16 dimensions.
        moments: Moments of its two sites.
        known: Their leading directions, 13 in all.
        design: What is measured.
        gradients: The exact gradient of every point, shape (B, dimensions).
        jacobians: The exact Jacobian of every point's features, shape (B, p, dimensions).
        view: The loss's view of its outputs, which are the features.
        measurements: Measurements of the step, without any error.
    """

    space: Space
    moments: list[Moments]
    known: Basis
    design: Design
    gradients: Tensor
    jacobians: Tensor
    view: LossView
    measurements: Measurements

    @property
    def mask(self) -> Tensor:
        """1 where noise has an effect, shape (B, dimensions)."""
        mask = self.space.mask
        return torch.ones_like(self.gradients) if mask is None else mask.to(self.gradients)

    @property
    def directions(self) -> Tensor:
        """All known directions as rows, shape (m, dimensions)."""
        return self.known.rows(torch.arange(self.known.size))

    def isotropic(self, point: int) -> Tensor:
        """Isotropic noise of a point, shape (n, dimensions)."""
        draws = torch.arange(int(self.design.iso[point]))
        return self.design.noise.rows(torch.full_like(draws, point), draws)


def case(masked: bool = False, predicted: bool = False, iso: tuple[int, ...] = ISO) -> Case:
    """A step whose directions are random, and whose derivatives are exact."""
    source = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.double)

    grids = (Grid(0, 3, 4, aligned=not masked), Grid(12, 2, 2, channels_first=True))
    mask = None
    if masked:
        lengths = torch.tensor([3, 2, 1, 3])
        real = torch.arange(3) < lengths.unsqueeze(1)
        first = real.unsqueeze(2).expand(-1, -1, 4).flatten(1)
        mask = torch.cat([first, torch.ones(SIZE, 4, dtype=torch.bool)], 1)
    vectors = signed(torch.linalg.qr(random(4, 4)).Q[:, :3])
    sketch = Factor(None, vectors, torch.tensor([4.0, 2.0, 1.0]).double(), 7.5)
    moments = [
        Moments(None if masked else _dense(random(3, 3)), sketch),
        Moments(_dense(random(2, 2)), _dense(random(2, 2))),
    ]
    known = leading(grids, moments, 0)
    space = Space(
        grids, 1, "gaussian", torch.double, 0.25, ("a", "b"), (5, 6, 7), [0, 1, 2, 3], mask
    )
    live = torch.ones(SIZE, 16).double() if mask is None else mask.double()
    residuals, common = random(SIZE, FEATURES), random(FEATURES, 16)
    jacobians = (common + 0.5 * random(SIZE, FEATURES, 16)) * live.unsqueeze(1)
    gradients = (residuals.unsqueeze(1) @ jacobians).squeeze(1)
    draws, first_ones = torch.tensor(DRAWS), torch.tensor(iso)
    draws = torch.maximum(draws, first_ones)
    guess = None
    if predicted:
        guess = ((gradients + 0.3 * gradients.norm() / 8 * random(SIZE, 16)) * live, 0.9)
    design = Design(space, known, first_ones, draws, guess)
    points = torch.repeat_interleave(torch.arange(SIZE), draws)
    number = torch.cat([torch.arange(int(n)) for n in draws])
    z = design.rows(points, number)
    along = (z * gradients[points]).sum(1)
    features = (jacobians[points] @ z.unsqueeze(2)).squeeze(2)
    view = LossView((0,), None, random(SIZE, FEATURES), residuals, None, random(2, FEATURES))
    seen = (design.scaled(points, number, features), view)
    measurements = design.measurements(points, design.scaled(points, number, along), seen)
    return Case(space, moments, known, design, gradients, jacobians, view, measurements)


def _dense(root: Tensor) -> Factor:
    size = len(root)
    none = root.new_zeros(size, 0)
    return Factor(root @ root.T, none, none[0], 0.0)
