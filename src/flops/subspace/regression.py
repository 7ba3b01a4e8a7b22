"""Regression: the posterior estimate of each point's gradient, its error, and the moments' update.

    delta = lift(c + tail) + eta * correction

c are the measured coordinates and tail the posterior mean of all others (`posterior`), which has
the least squared error *of each point*. The correction is the isotropic queries' mean of held-out
residual times noise, which makes the mean over draws exact, but is far noisier. In a batch, errors
common to all points add up, while noise averages out; so eta is the share of signal in the batch's
summed correction, a running average: 0 if the points' errors have nothing in common.

Draws are assigned to points on the CPU; noise, basis and derivatives are on the device of the
perturbed tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flops.perturb.random import NoiseStream
from flops.subspace.basis import Basis, Change, Moments, Space

FITTED = 512  # maximum of isotropic draws of a point in the fit, which is cubic in them
BLOCK = 4_000_000  # noise values, or entries of kernels, in one block of points
ROOM = 1 << 22  # values of all gradients that the moments learn from, if there are several a point
RIDGES = (1.0, 1 / 3, 3.0)  # factors of the ridge to compare by leave-one-out residuals
LEAST = 1e-6  # lower bound of the noise in a fit, relative to its kernel
CLEARLY = 1 - 1e-6  # another ridge must be better by more than rounding


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

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws; a point's draws are consecutive."""
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


@dataclass(frozen=True)
class Regression:
    """Results of the regression, shape (B, dimensions) unless noted.

    Attributes:
        inside: Measured part of each gradient.
        tail: Posterior mean of the rest.
        outside: Isotropic estimate of the unmeasured part, for learning.
        correction: Added to inside + tail, it makes them unbiased.
        missed: Mean squared residual after the measured part, shape (B,).
        error: Mean squared held-out residual: the squared error of inside + tail, shape (B,).
        ridge: The ridge for the next step.
    """

    inside: Tensor
    tail: Tensor
    outside: Tensor
    correction: Tensor
    missed: Tensor
    error: Tensor
    ridge: float

    @property
    def energy(self) -> Tensor:
        """Squared norm of each gradient, shape (B,)."""
        return self.inside.square().sum(1) + self.missed


def regress(measurements: Measurements, ridge: float, tune: bool) -> Regression:
    """Fit the isotropic residuals, for the posterior mean of the unmeasured part.

    Args:
        measurements: The measurements.
        ridge: Noise of the fit, relative to the prior energy of the unmeasured part.
        tune: Whether to search for a better ridge.
    """
    space, known = measurements.space, measurements.known
    inside = known.lift(measurements.c)
    predicted = measurements.predicted
    if predicted is not None and measurements.a is not None:
        inside = inside + measurements.a.unsqueeze(1) * predicted
    tail, outside, correction = (torch.zeros_like(inside) for _ in range(3))
    missed, error = (inside.new_zeros(len(inside)) for _ in range(2))
    factors = RIDGES if tune else RIDGES[:1]
    scores = [0.0] * len(factors)
    prior = torch.where(measurements.measured, 0.0, measurements.prior)
    flat = known.rest * (space.dimensions - known.size)
    for points, real, whole in measurements.blocks():  # whole: noise, shape (b, n, dimensions)
        seen = whole if space.mask is None else whole * space.mask[points].unsqueeze(1)
        e = known.coordinates(seen.flatten(0, 1)).view(*real.shape, -1)
        derivatives = torch.where(real, measurements.w[points, : real.size(1)], 0.0)
        r = derivatives - (e @ measurements.c[points].unsqueeze(2)).squeeze(2)
        along = torch.zeros_like(r)
        if predicted is not None and measurements.a is not None:
            along = (seen @ predicted[points].unsqueeze(2)).squeeze(2)
            r = r - along * measurements.a[points].unsqueeze(1)
        count = measurements.fitted[points].unsqueeze(1).to(r.device)
        kernel = (e * prior[points].unsqueeze(1)) @ e.transpose(1, 2)
        if known.rest > 0:
            kernel += known.rest * (seen @ seen.transpose(1, 2) - e @ e.transpose(1, 2))
        # Prior energy of the unmeasured part, times the ridge: the prior is not exact.
        noise = ridge * (prior[points].sum(1) + flat) + LEAST
        fits = [posterior(kernel, r, noise * factor, real) for factor in factors]
        squares = r.square().sum(1, keepdim=True).clamp(min=torch.finfo(r.dtype).tiny)
        for i, one in enumerate(fits):  # each point counts by its number of queries
            scores[i] += float((one.held_out.square() / squares * count).double().sum())
        fit = fits[0]
        weights = torch.stack([fit.alpha, fit.without - fit.alpha, r], 1)  # (b, 3, n)
        in_z, in_e = weights @ seen, weights @ e
        within = in_e * torch.stack(
            [prior[points], prior[points], 1.0 * measurements.measured[points]], 1
        )
        # Known directions are weighted by their energies, all others equally.
        scale = torch.tensor([known.rest, known.rest, 0.0]).view(1, 3, 1).to(r)
        fitted = known.lift((within - scale * in_e).flatten(0, 1)).view_as(in_z) + scale * in_z
        tail[points] = fitted[:, 0]
        held_out = (fit.held_out / count).unsqueeze(1)
        correction[points] = fitted[:, 1] + (held_out @ whole).squeeze(1)
        outside[points] = in_z[:, 2] - fitted[:, 2]
        missed[points] = r.square().sum(1)
        error[points] = (fit.held_out.square() / count).sum(1)
    for at, draw, z in measurements.unfitted():  # not in the fit, but in the averages
        seen = z if space.mask is None else z * space.mask[at]
        e = known.coordinates(seen)
        r = measurements.w[at, draw] - (measurements.c[at] * e).sum(1)
        if predicted is not None and measurements.a is not None:
            r = r - (seen * predicted[at]).sum(1) * measurements.a[at]
        rest = seen - known.lift(torch.where(measurements.measured[at], e, 0.0))
        outside.index_add_(0, at.to(r.device), r.unsqueeze(1) * rest)
        missed.index_add_(0, at.to(r.device), r.square())
    n = measurements.iso.clamp(min=1).to(missed.device)
    outside, missed = outside / n.unsqueeze(1), missed / n
    best = scores.index(min(scores))
    if scores[best] < CLEARLY * scores[0]:
        ridge = min(100.0, max(1e-4, ridge * factors[best]))
    return Regression(inside, tail, outside, correction, missed, error, ridge)


@dataclass(frozen=True)
class Posterior:
    """A fit of every point's residuals; rows of padding are zero.

    Attributes:
        alpha: (K + N)^-1 r: the posterior mean is Lambda Z^T alpha, shape (b, n).
        held_out: Residual of each query by the fit to the others, shape (b, n).
        without: Weights like alpha, averaged over fits that leave one query out, shape (b, n).
    """

    alpha: Tensor
    held_out: Tensor
    without: Tensor


def posterior(kernel: Tensor, r: Tensor, noise: Tensor, real: Tensor) -> Posterior:
    """Fit the residuals of a block of points.

    Given the measured coordinates, a directional derivative along isotropic noise z has the
    residual r = <g, z>, g the part of the gradient in all other directions. With the prior
    g ~ N(0, e Lambda), e the point's energy, the posterior mean is Lambda Z^T alpha with
    alpha = (Z Lambda Z^T + N)^-1 r: ridge regression with the learned covariance as its metric.
    Leave-one-out residuals follow from the same inverse: alpha_i / (K + N)^-1_ii.

    Args:
        kernel: Z Lambda Z^T at unit energy, shape (b, n, n).
        r: Residuals, shape (b, n).
        noise: Variance of a residual that the prior does not explain, at unit energy, shape (b,).
        real: Mask of the queries, shape (b, n).
    """
    both = real.unsqueeze(1) & real.unsqueeze(2)
    noise = torch.where(real, noise.unsqueeze(1), 1.0)
    # In double precision: with a narrow prior and little noise the system is almost singular.
    system = torch.where(both, kernel, 0.0).double() + torch.diag_embed(noise.double())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
    alpha = (inverse @ r.double().unsqueeze(2)).squeeze(2)
    held_out = torch.where(real, alpha / inverse.diagonal(dim1=1, dim2=2), 0.0)
    # The fit without query i has the weights alpha - (K + N)^-1_i held_out_i, zero for i itself.
    shares = held_out / real.sum(1, keepdim=True).clamp(min=1)
    without = torch.where(real, alpha - (inverse @ shares.unsqueeze(2)).squeeze(2), 0.0)
    return Posterior(torch.where(real, alpha, 0.0).to(r), held_out.to(r), without.to(r))


def coherence(measurements: Measurements, found: Regression) -> tuple[float, float]:
    """Squared norm of the batch's summed correction, and its part due to noise."""
    live = measurements.iso > 0
    fitted = measurements.fitted[live].to(found.error.device)
    noise = (found.error * measurements.space.dimensions)[live] / fitted
    return float(found.correction.sum(0).square().sum()), float(noise.sum())


def explained_variance(found: Regression) -> tuple[float, float]:
    """Measured share of the energy, and its standard error over the points."""
    whole = found.energy.sum()
    missed = found.missed.sum() / whole
    error = (found.missed - missed * found.energy).square().sum().sqrt() / whole
    return 1 - float(missed), float(error)


def explained_by_site(measurements: Measurements, found: Regression) -> list[float]:
    """Measured share of each site's energy in this step.

    Residuals do not distinguish the sites, so their total is split in proportion to the energies of
    the isotropic estimates, minus their noise.
    """
    n = measurements.iso.clamp(min=1).to(found.missed)
    measured, missed = [], []
    for g in measurements.space.grids:
        square = g.cut(found.outside).square().sum((1, 2)) - found.missed * g.size / n
        missed.append(max(1e-300, float((square * n / (n + 1)).sum())))
        measured.append(float(g.cut(found.inside).square().sum()))
    scale = float(found.missed.sum()) / sum(missed)
    return [a / max(a + b * scale, 1e-300) for a, b in zip(measured, missed, strict=True)]


@dataclass(frozen=True)
class Seen:
    """What the moments learn from: P gradients, of losses or in directions of the outputs.

    Attributes:
        inside: Their measured part, shape (P, dimensions).
        outside: Isotropic estimate of the rest, shape (P, dimensions).
        missed: Mean squared residual after the measured part, shape (P,).
        energy: Energy of the gradients of the same point, shape (P,).
        point: Point of each.
        n: Isotropic draws of each.
    """

    inside: Tensor
    outside: Tensor
    missed: Tensor
    energy: Tensor
    point: Tensor
    n: Tensor


def _of_losses(measurements: Measurements, found: Regression) -> Seen:
    """The gradient of every point's loss."""
    point = torch.arange(len(found.missed), device=found.missed.device)
    n = measurements.iso.clamp(min=1).to(found.missed)
    return Seen(found.inside, found.outside, found.missed, found.energy, point, n)


def _of_features(measurements: Measurements, features: Features) -> Seen:
    """What the gradient of every point would be for the residuals of others."""
    known, space, u = measurements.known, measurements.space, measurements.predicted
    w, c, a = (x @ features.roots.T for x in (features.w, features.c, features.a))
    size, more = len(w), w.size(2)
    outside = w.new_zeros(size, more, space.dimensions)
    missed = w.new_zeros(size, more)
    for points, real, whole in measurements.blocks():
        seen = whole if space.mask is None else whole * space.mask[points].unsqueeze(1)
        e = known.coordinates(seen.flatten(0, 1)).view(*real.shape, -1)
        derivatives = torch.where(real.unsqueeze(2), w[points, : real.size(1)], 0.0)
        r = derivatives - e @ c[points]
        if u is not None:
            r = r - (seen @ u[points].unsqueeze(2)) * a[points].unsqueeze(1)
        r = torch.where(real.unsqueeze(2), r, 0.0).transpose(1, 2)  # (b, q, n)
        in_e = (r @ e) * measurements.measured[points].unsqueeze(1)
        outside[points] = r @ seen - known.lift(in_e.flatten(0, 1)).view(len(points), more, -1)
        missed[points] = r.square().sum(2)
    n = measurements.fitted.clamp(min=1).to(missed).unsqueeze(1)
    outside, missed = outside / n.unsqueeze(2), missed / n
    inside = known.lift(c.transpose(1, 2).flatten(0, 1)).view_as(outside)
    if u is not None:
        inside = inside + a.unsqueeze(2) * u.unsqueeze(1)
    energy = inside.square().sum((1, 2)) + missed.sum(1)
    point = torch.arange(size, device=w.device).repeat_interleave(more)
    return Seen(
        inside.flatten(0, 1),
        outside.flatten(0, 1),
        missed.flatten(),
        energy[point],
        point,
        n.squeeze(1)[point],
    )


def learn(
    measurements: Measurements,
    found: Regression,
    moments: Sequence[Moments],
    keep: float,
    step: int,
    losses: Tensor,
) -> list[Moments]:
    """The moments after this step.

    Points are weighted by inverse variance: the noise of a point's outer product is about its
    energy over its number n of isotropic queries. For Gaussian z,
    E[out out^T] = (1 + 1/n) g g^T + |g|^2 / n I in the unmeasured directions.

    With outputs, g is replaced by the gradients that the point would have for the residuals of the
    batch: their second moment is J^T R J, with R that of the residuals.
    """
    space, known = measurements.space, measurements.known
    features = measurements.features
    most = ROOM // (space.size * space.dimensions)  # directions of residuals
    if features is None or most < min(2, len(features.roots)):
        seen = _of_losses(measurements, found)
        resolution = torch.finfo(losses.dtype).eps * float(losses.abs().max()) / space.sigma
    else:
        seen = _of_features(measurements, replace(features, roots=features.roots[:most]))
        resolution = features.resolution
    n, audible = seen.n, seen.energy > (10 * resolution) ** 2
    live = audible & (measurements.iso > 0).to(space.device)[seen.point]
    weight = torch.where(live, n.square() / torch.where(live, seen.energy, 1.0), 0.0)
    over = 1 / (n + 1)
    plus = (seen.inside + seen.outside) * weight.sqrt().unsqueeze(1)
    minus = seen.outside * (weight * over).sqrt().unsqueeze(1)
    floor = weight * (1 - over) * seen.missed / n
    cover = (floor.unsqueeze(1) * measurements.measured[seen.point]).sum(0)
    learned = []
    for s, (m, g) in enumerate(zip(moments, space.grids, strict=True)):
        mine = torch.nonzero(known.site == s).flatten()
        used = torch.full_like(floor, g.positions)
        if not g.aligned and space.mask is not None:
            used = g.cut(space.mask)[:, :, 0].sum(1).to(floor)[seen.point]
        over_channels = _change(
            g.cut(plus).flatten(0, 1),
            g.cut(minus).flatten(0, 1),
            float((floor * used).sum()),
            known.channels[s],
            known.column[mine],
            cover[mine],
        )
        positions = m.positions
        if positions is not None:
            over_positions = _change(
                g.cut(plus).transpose(1, 2).flatten(0, 1),
                g.cut(minus).transpose(1, 2).flatten(0, 1),
                float(floor.sum()) * g.channels,
                known.positions[s],
                known.row[mine],
                cover[mine],
            )
            positions = positions.updated(keep, over_positions, step)
        learned.append(Moments(positions, m.channels.updated(keep, over_channels, step)))
    return learned


def _change(
    plus: Tensor, minus: Tensor, floor: float, vectors: Tensor, number: Tensor, cover: Tensor
) -> Change:
    summed = plus.new_zeros(vectors.size(1)).index_add_(0, number, cover)
    return Change(plus, minus, floor, vectors, summed)
