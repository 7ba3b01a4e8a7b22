"""Measurements of a step: directional derivatives of losses and of features of the outputs.

Draws are assigned to points on the CPU; noise, basis and derivatives are on the device of the
perturbed tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flops.perturb.random import NoiseStream
from flops.subspace.basis import Basis, Space

FITTED = 512  # maximum of isotropic draws of a point in the fit, which is cubic in them
BLOCK = 4_000_000  # noise values, or entries of kernels, in one block of points


class Isotropic:
    """Isotropic noise of all points, cached if small, else regenerated.

    Args:
        space: Space of the noise.
        iso: Draws of each point, shape (B,), on the CPU.
    """

    def __init__(self, space: Space, iso: Tensor) -> None:
        self._dtype, size = space.dtype, space.dimensions
        self._stream = NoiseStream(
            space.noise, space.key, space.ids, iso.tolist(), size, space.device
        )
        self._start = iso.cumsum(0) - iso
        small = int(iso.sum()) * size <= BLOCK
        kept = int(iso.sum()) if small else 0
        self._kept = torch.zeros(kept, size, dtype=self._dtype, device=space.device)
        self._have = torch.zeros(len(self._kept), dtype=torch.bool)
        self._actual: Tensor | None = None
        self._first = 0

    def after(self, first: int) -> Isotropic:
        """The same noise, with point ``first`` as point 0."""
        other = copy.copy(self)
        other._first = first
        return other

    def renumbered(self, actual: Tensor) -> Isotropic:
        """The same noise, with draw i of point j under the number ``actual[j, i]``."""
        other = copy.copy(self)
        other._actual = actual
        return other

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws."""
        points = points + self._first
        draws = draws if self._actual is None else self._actual[points, draws]
        at = self._start[points] + draws
        if len(self._kept) and bool(self._have[at].all()):
            return self._kept[at]
        rows = self._stream.rows(points, draws).to(self._dtype)
        if len(self._kept):
            self._kept[at], self._have[at] = rows, True
        return rows


@dataclass(frozen=True)
class Features:
    """Derivatives of p features of the outputs; see `flops.passes.loss_view`.

    Attributes:
        w: Of each draw, shape (B, most draws, p).
        c: Along the measured directions, shape (B, m, p).
        a: Along the predicted direction, shape (B, p).
        roots: Root of the second moment of residuals, shape (q, p).
        resolution: Rounding of a derivative.
    """

    w: Tensor
    c: Tensor
    a: Tensor
    roots: Tensor
    resolution: float


@dataclass(frozen=True)
class Measurements:
    """The measurements of a step.

    Attributes:
        space: Space of the noise.
        known: The basis.
        noise: The isotropic draws.
        iso: Isotropic draws of each point, shape (B,).
        draws: All draws of each point, shape (B,).
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Which directions were measured, shape (B, m).
        w: Directional derivative of each draw, shape (B, most draws).
        c: Measured coordinates, shape (B, m).
        predicted: A direction of each point that was measured, too, shape (B, dimensions), zero
            without; None if there is none.
        a: The coordinates along it, shape (B,).
        features: Derivatives of the features of the outputs; None if only losses are known.
    """

    space: Space
    known: Basis
    noise: Isotropic
    iso: Tensor
    draws: Tensor
    prior: Tensor
    measured: Tensor
    w: Tensor
    c: Tensor
    predicted: Tensor | None = None
    a: Tensor | None = None
    features: Features | None = None

    @property
    def fitted(self) -> Tensor:
        """Isotropic draws in the regression, shape (B,)."""
        return self.iso.clamp(max=FITTED)

    def part(self, first: int, last: int) -> Measurements:
        """The measurements of points first, ..., last - 1."""
        own, space = slice(first, last), self.space
        mask = None if space.mask is None else space.mask[own]
        features = self.features
        if features is not None:
            parts = {name: getattr(features, name)[own] for name in ("w", "c", "a")}
            features = replace(features, **parts)
        return replace(
            self,
            space=replace(space, ids=space.ids[own], mask=mask),
            noise=self.noise.after(first),
            iso=self.iso[own],
            draws=self.draws[own],
            prior=self.prior if len(self.prior) == 1 else self.prior[own],
            measured=self.measured[own],
            w=self.w[own],
            c=self.c[own],
            predicted=None if self.predicted is None else self.predicted[own],
            a=None if self.a is None else self.a[own],
            features=features,
        )

    def blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Points with similar numbers n of isotropic draws.

        Yields points, a mask of the draws, shape (b, n), and their noise, shape
        (b, n, dimensions), zero in the padding.
        """
        count = self.fitted
        order = count.argsort(stable=True)
        order = order[count[order] > 0]
        for points in _cut(order, count, self.space.dimensions):
            real = torch.arange(int(count[points].max())) < count[points].unsqueeze(1)
            place, draw = torch.nonzero(real).unbind(1)
            noise = self.w.new_zeros(*real.shape, self.space.dimensions)
            noise[real] = self.noise.rows(points[place], draw)
            yield points, real.to(noise.device), noise

    def unfitted(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Points, numbers and noise of the isotropic draws that are not fitted, shape (rows,)."""
        real = torch.arange(int(self.iso.max())) < self.iso.unsqueeze(1)
        points, draws = torch.nonzero(real[:, FITTED:]).unbind(1)
        size = max(1, BLOCK // self.space.dimensions)
        for at, draw in zip(points.split(size), (draws + FITTED).split(size), strict=True):
            if len(at):
                yield at, draw, self.noise.rows(at, draw)


def _cut(order: Tensor, iso: Tensor, dimensions: int) -> Iterator[Tensor]:
    """Slices of points, sorted by draws, whose noise and kernels fit into a block."""
    start, counts = 0, iso[order].tolist()
    for end, count in enumerate(counts):
        size = (end + 1 - start) * count * max(dimensions, count)
        uneven = count > 2 * counts[start] and size > BLOCK // 16  # mostly padding
        if end > start and (uneven or size > BLOCK):
            yield order[start:end]
            start = end
    if counts:
        yield order[start:]
