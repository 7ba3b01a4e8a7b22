"""Measurements of a step: which direction every draw of every point measures, and its derivative.

A `Design` plans them, and sorts the derivatives of losses and of features of the outputs into
`Measurements`. Draws are assigned to points on the CPU; noise, basis and derivatives are on the
device of the perturbed tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.passes.loss_view import LossView
from flops.perturb.random import NoiseStream
from flops.subspace.basis import Basis, Space, ordered

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


class Design:
    """The planned measurements of a step.

    Args:
        space: Space of the noise.
        known: The basis.
        iso: Isotropic draws of each point, shape (B,).
        draws: All draws of each point, shape (B,).
        prediction: Predicted gradient of each point, zero at padding, shape (B, dimensions), and
            the share of the energy that it is expected to hold; None without.
        decide: Called with which points measure it; returns those that do. None for these.

    Attributes:
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Directions that each point measures, shape (B, m).
        expected: Mean share of the energy that the predicted gradients are expected to hold outside
            of these directions.
    """

    def __init__(
        self,
        space: Space,
        known: Basis,
        iso: Tensor,
        draws: Tensor,
        prediction: tuple[Tensor, float] | None = None,
        decide: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.space, self.known, self.iso, self.draws = space, known, iso, draws
        shaped = draws - iso
        self.prior, self._order = ordered(space, known, int(shaped.max()))
        self._first, self.predicted, self.expected = iso, None, 0.0
        if prediction is not None and int(shaped.max()):
            self.measured = self._measures(shaped - 1)
            used, units = self._outside(*prediction, shaped)
            used = used if decide is None else decide("predicted", used)
            self._first = iso + used
            measure = used.to(units.device).unsqueeze(1) > 0
            self.predicted = torch.where(measure, units, 0.0)
        self.measured = self._measures(draws - self._first)
        # The norm of a Gaussian vector over the k directions: above rounding, below curvature.
        self._length = max(1.0, float(shaped.double().mean())) ** 0.5
        self.noise = Isotropic(space, iso)

    def _measures(self, count: Tensor) -> Tensor:
        """Mask of the first directions of each point, shape (B, m)."""
        inside = torch.arange(self._order.size(1)) < count.unsqueeze(1)
        shape = (self.space.size, self.known.size)
        mask = torch.zeros(shape, dtype=torch.bool, device=self.space.device)
        mask[torch.nonzero(inside)[:, 0], self._order[inside]] = True
        return mask

    def _outside(self, predicted: Tensor, share: float, shaped: Tensor) -> tuple[Tensor, Tensor]:
        """Which points measure their predicted gradient in place of their last direction.

        Those where it is expected to hold more energy. Also its unit vectors, outside of what else
        is measured.
        """
        left = predicted - self.known.lift(self.known.coordinates(predicted) * self.measured)
        squares, whole = left.square().sum(1), predicted.square().sum(1)
        points = torch.arange(len(shaped))
        last = self._order[points, (shaped - 1).clamp(min=0)].to(self.prior.device)
        prior = self.prior.expand(len(shaped), -1)[points.to(last.device), last]
        used = (share * squares > prior * whole) & (squares > 1e-6 * whole)
        used &= (shaped > 0).to(used.device)
        self.expected = share * float((squares / whole.clamp(min=1e-30)).double().mean())
        units = left / squares.clamp(min=1e-30).sqrt().unsqueeze(1)
        return used.long().cpu(), units

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws, shape (draws, dimensions); a point's draws are consecutive."""
        first = draws < self.iso[points]
        shape = (len(points), self.space.dimensions)
        z = torch.empty(shape, dtype=self.space.dtype, device=self.space.device)
        if bool(first.any()):
            z[first] = self.noise.rows(points[first], draws[first])
        later = draws >= self._first[points]
        if self.predicted is not None:
            between = ~first & ~later
            z[between] = (self._length * self.predicted[points[between]]).to(z)
        number = self._number(points[later], draws[later])
        if len(number):
            z[later] = self.known.rows(number, self._length).to(z)
        return z

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor:
        """Derivatives along unit noise and unit directions, given those along `rows`."""
        lengths = torch.ones(len(draws), dtype=derivatives.dtype)
        lengths[draws >= self.iso[points]] = self._length
        lengths = lengths.to(derivatives.device)
        return derivatives / (lengths if derivatives.dim() == 1 else lengths.unsqueeze(1))

    def measurements(
        self, points: Tensor, derivatives: Tensor, seen: tuple[Tensor, LossView] | None
    ) -> Measurements:
        """All derivatives of the step, in the order of points and draws.

        Args:
            points: Point of each draw.
            derivatives: Of the losses, shape (draws,).
            seen: Derivatives of the features, shape (draws, p), and the view that they are of.
        """
        firsts = torch.cumsum(self.draws, 0) - self.draws
        draw = torch.arange(len(points)) - firsts[points]
        w, c, a = (x.squeeze(2) for x in self._sorted(points, draw, derivatives.unsqueeze(1)))
        features = None
        if seen is not None:
            values, view = seen
            all_w, all_c, all_a = self._sorted(points, draw, values)
            features = Features(
                all_w,
                all_c,
                all_a.squeeze(1),
                view.roots.to(all_w),
                view.resolution / self.space.sigma,
            )
        found = Measurements(
            self.space,
            self.known,
            self.noise,
            self.iso,
            self.draws,
            self.prior,
            self.measured,
            w,
            c,
            self.predicted,
            a.squeeze(1),
            features,
        )
        missing = torch.isnan(derivatives)
        return self._arrived(found, points, draw, missing) if bool(missing.any()) else found

    def _arrived(
        self, found: Measurements, points: Tensor, draw: Tensor, missing: Tensor
    ) -> Measurements:
        """The measurements without draws that failed; isotropic ones are numbered anew."""
        later = missing & (draw >= self._first[points])
        measured = self.measured.clone()
        measured[points[later], self._number(points[later], draw[later])] = False
        there = ~missing & (draw < self.iso[points])
        at, size = points[there], len(self.draws)
        iso = torch.bincount(at, minlength=size)
        rank = torch.arange(len(at)) - (torch.cumsum(iso, 0) - iso)[at]
        actual = torch.zeros(found.w.shape, dtype=torch.long)
        actual[at, rank] = draw[there]
        w = torch.zeros_like(found.w)
        w[at, rank] = found.w[at, draw[there]]
        predicted, features = found.predicted, found.features
        if predicted is not None and found.a is not None:
            predicted = torch.where(torch.isnan(found.a).unsqueeze(1), 0.0, predicted)
        if features is not None:
            all_w = torch.zeros_like(features.w)
            all_w[at, rank] = features.w[at, draw[there]]
            all_c, all_a = features.c.nan_to_num(0.0), features.a.nan_to_num(0.0)
            features = replace(features, w=all_w, c=all_c, a=all_a)
        return replace(
            found,
            noise=self.noise.renumbered(actual),
            iso=iso,
            draws=torch.bincount(points[~missing], minlength=size),
            measured=measured,
            w=w,
            c=found.c.nan_to_num(0.0),
            predicted=predicted,
            a=None if found.a is None else found.a.nan_to_num(0.0),
            features=features,
        )

    def _sorted(
        self, points: Tensor, draw: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values by draw (B, most, p), by direction (B, m, p), and of the prediction (B, 1, p)."""
        size, space, width = self.space.size, self.space, values.size(1)
        most, values = max(1, int(self.draws.max())), values.to(space.device, space.dtype)
        w = torch.zeros(size, most, width, dtype=space.dtype, device=space.device)
        c, a = w.new_zeros(size, self.known.size, width), w.new_zeros(size, 1, width)
        w[points, draw] = values
        later = draw >= self._first[points]
        c[points[later], self._number(points[later], draw[later])] = values[later]
        between = (draw >= self.iso[points]) & ~later
        a[points[between], 0] = values[between]
        return w, c, a

    def _number(self, points: Tensor, draws: Tensor) -> Tensor:
        return self._order[points, draws - self._first[points]]
