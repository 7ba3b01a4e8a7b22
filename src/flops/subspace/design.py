"""Design of a step: which direction every draw of every point measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flops.passes.loss_view import LossView
from flops.perturb.noise import NoiseStream
from flops.subspace.basis import Basis, Space
from flops.subspace.measurements import Features, Isotropic, Measurements


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
        self.prior, self._order = _order(space, known, int(shaped.max()))
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


def needed(space: Space, shaped: Tensor) -> int:
    """Number of leading directions, so that every point has enough outside of its padding."""
    most = int(shaped.max())
    if space.mask is None:
        return most
    parts = [g.cut(space.mask)[:, :, 0].sum(1).clamp(min=1) / g.positions for g in space.grids]
    return math.ceil(most / min(float(part.min()) for part in parts)) + max(
        g.positions for g in space.grids
    )


def real_directions(space: Space, known: Basis) -> Tensor:
    """Directions outside of a point's padding, shape (B, m) or (1, m)."""
    if space.mask is None:
        return torch.ones(1, known.size, dtype=torch.bool, device=space.device)
    real = torch.ones(space.size, known.size, dtype=torch.bool, device=space.device)
    for s, g in enumerate(space.grids):
        if not g.aligned:
            mine = torch.nonzero(known.site == s).flatten()
            real[:, mine] = g.cut(space.mask)[:, :, 0].bool()[:, known.row[mine]]
    return real


def _order(space: Space, known: Basis, most: int) -> tuple[Tensor, Tensor]:
    """Expected energies by point, (B, m) or (1, m), and each point's order of directions."""
    size = space.size
    if space.mask is None:
        return known.energy.unsqueeze(0), torch.arange(most).expand(size, most)
    real = real_directions(space, known)
    energy = torch.where(real, known.energy, 0.0)
    for s, g in enumerate(space.grids):
        if not g.aligned:  # the energy of all positions lies in the real ones
            mine = torch.nonzero(known.site == s).flatten()
            valid = g.cut(space.mask)[:, :, 0].sum(1, keepdim=True).clamp(min=1)
            energy[:, mine] *= g.positions / valid
    # Positions are exchangeable: measured ones are chosen at random; padding comes last.
    ones, points = [1] * size, torch.arange(size)
    stream = NoiseStream("gaussian", (*space.key, 2), space.ids, ones, known.size, space.device)
    chance = torch.special.ndtr(stream.rows(points, torch.zeros_like(points)))
    wish = torch.where(real, energy * (1 + 1e-3 * chance), -1.0)
    return energy, wish.argsort(dim=1, descending=True, stable=True)[:, :most].cpu()
