"""Regression: the posterior estimate of each point's gradient, and its error.

    delta = lift(c + tail) + eta * correction

c are the measured coordinates and tail the posterior mean of all others (`posterior`), which has
the least squared error *of each point*. The correction is the isotropic queries' mean of held-out
residual times noise, which makes the mean over draws exact, but is far noisier. In a batch, errors
common to all points add up, while noise averages out; so eta is the share of signal in the batch's
summed correction, a running average: 0 if the points' errors have nothing in common.

Everything else that a group learns of a step, besides the second moments and the mean Jacobian,
follows from sums over the points, to which all replicas add theirs (`StepSums`): explained
variance, ridge, share of signal, reliability and the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.config import Shaping
from flops.subspace.measurements import Measurements

RIDGES = (1.0, 1 / 3, 3.0)  # factors of the ridge to compare by leave-one-out residuals
AHEAD = 256  # directions whose expected energies are averaged over all points
LEAST = 1e-6  # lower bound of the noise in a fit, relative to its kernel
CLEARLY = 1 - 1e-6  # another ridge must be better by more than rounding
EXPLAINED = 1e-9  # share of a point's squared derivatives below which residuals are rounding
KEEP = 0.98  # decay of the second moments: per step, or with outputs per `POINTS` points
POINTS, LEAST_KEEP = 12, 0.85  # and its lower bound for a step
FALL = 0.7  # drop of explained variance, relative to its best, that discounts the moments


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
        ridge: The ridge for the next step, by these points alone.
        scores: Sum of squared held-out residuals with each of the compared ridges.
    """

    inside: Tensor
    tail: Tensor
    outside: Tensor
    correction: Tensor
    missed: Tensor
    error: Tensor
    ridge: float
    scores: tuple[float, ...] = ()

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
        # Each point counts by its number of queries, if its residuals are more than rounding.
        left = squares > EXPLAINED * derivatives.square().sum(1, keepdim=True)
        counted = torch.where(left, count / squares, 0.0)
        for i, one in enumerate(fits):
            scores[i] += float((one.held_out.square() * counted).double().sum())
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
    ridge = better_ridge(ridge, scores)
    return Regression(inside, tail, outside, correction, missed, error, ridge, tuple(scores))


def better_ridge(ridge: float, scores: Sequence[float]) -> float:
    """The ridge for the next step, from the held-out residuals with it and with others."""
    best = min(range(len(scores)), key=lambda i: scores[i])
    if scores[best] < CLEARLY * scores[0]:
        ridge = min(100.0, max(1e-4, ridge * RIDGES[best]))
    return ridge


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


@dataclass(frozen=True)
class StepSums:
    """Sums over points, in double precision unless noted.

    Attributes:
        fit: Energy and unexplained energy; their squares and product, shape (5,).
        errors: Squared error of the posterior mean, of its correction, and of isotropic estimates,
            shape (3,).
        scores: Squared held-out residuals with each ridge, shape (3,).
        sites: Measured directions, measured and unexplained energy of each site, shape (sites, 3).
        counts: Points, draws, isotropic draws and predicted directions, shape (4,).
        expected: Share of energy that predicted directions are expected to hold, shape (1,).
        prior: Expected energy of the first directions, shape (AHEAD,).
        correction: The correction, shape (values,), in the precision of the step.
    """

    fit: Tensor
    errors: Tensor
    scores: Tensor
    sites: Tensor
    counts: Tensor
    expected: Tensor
    prior: Tensor
    correction: Tensor

    @classmethod
    def of(cls, measurements: Measurements, found: Regression, expected: float = 0.0) -> StepSums:
        """Sums over these points.

        Args:
            measurements: The measurements.
            found: Their regression.
            expected: Mean share of energy in the predicted directions (`Design.expected`).
        """
        space, size = measurements.space, len(measurements.iso)
        energy, missed = found.energy.double(), found.missed.double()
        drawn = measurements.draws.clamp(min=1).to(found.missed)
        n, sites = measurements.iso.clamp(min=1).to(found.missed), []
        for s, g in enumerate(space.grids):
            square = g.cut(found.outside).square().sum((1, 2)) - found.missed * g.size / n
            mine = measurements.measured[:, measurements.known.site == s]
            inside = g.cut(found.inside).square().sum()
            sites += [mine.sum(), inside, (square * n / (n + 1)).sum()]
        u, some = measurements.predicted, measurements.prior[:, :AHEAD].double().cpu()
        predicted = 0 if u is None else int(u.any(1).sum())
        counts = [size, int(measurements.draws.sum()), int(measurements.iso.sum()), predicted]
        prior, scores = torch.zeros(AHEAD, dtype=torch.float64), torch.zeros(3).double()
        prior[: some.size(1)] = some.mean(0) * size
        scores[: len(found.scores)] = torch.tensor(found.scores).double()
        return cls(
            _sums(energy, missed, energy.square(), missed.square(), energy * missed),
            _sums(
                found.error,
                correction_noise(measurements, found),
                found.energy * space.dimensions / drawn,
            ),
            scores,
            _sums(*sites).view(-1, 3),
            torch.tensor(counts, dtype=torch.float64),
            torch.tensor([expected * size], dtype=torch.float64),
            prior,
            found.correction.sum(0),
        )

    def joined(self, replicas: Replicas, measurements: Measurements) -> StepSums:
        """Sums over the points of all replicas, in one message for each precision.

        Where the numbers of positions differ, the correction is that of the first ones.

        Args:
            replicas: The replicas.
            measurements: Measurements of this one.
        """
        if not replicas.several:
            return self
        grids, row = measurements.space.grids, self.correction.unsqueeze(0)
        lengths = replicas.max(torch.tensor([float(g.positions) for g in grids])).tolist()
        padded = [
            F.pad(g.cut(row)[0], (0, 0, 0, int(most) - g.positions)).flatten()
            for g, most in zip(grids, lengths, strict=True)
        ]
        own = [getattr(self, f.name) for f in fields(self)[:-1]]
        return StepSums(*replicas.sum([*own, torch.cat(padded)]))

    @property
    def points(self) -> float:
        """Number of points."""
        return float(self.counts[0])


def correction_noise(measurements: Measurements, found: Regression) -> Tensor:
    """Noise of each point's correction: its expected squared norm, shape (B,)."""
    noise = found.error * measurements.space.dimensions
    noise = noise / measurements.fitted.clamp(min=1).to(noise)
    return torch.where((measurements.iso > 0).to(noise.device), noise, 0.0)


def _sums(*parts: Tensor) -> Tensor:
    return torch.stack([part.double().sum().cpu() for part in parts])


def coherence(sums: StepSums) -> tuple[float, float]:
    """Squared norm of the batch's summed correction, and its part due to noise."""
    return float(sums.correction.square().sum()), float(sums.errors[1])


def explained_variance(sums: StepSums) -> tuple[float, float]:
    """Measured share of the energy, and its standard error over the points."""
    whole, left, squares, left_squares, product = sums.fit.tolist()
    missed = left / whole
    error = left_squares - 2 * missed * product + missed**2 * squares
    return 1 - missed, max(0.0, error) ** 0.5 / whole


def exploration(shaping: Shaping, explained: float) -> float:
    """Share of isotropic queries, which decreases with the explained variance."""
    if shaping.explore is not None:
        return shaping.explore
    return 0.1 + 0.6 * (1 - min(1.0, max(0.0, explained)))


def decay(
    shaping: Shaping, now: float, spread: float, running: float, best: float, points: int = 0
) -> tuple[float, float]:
    """Decay of the moments, and the best explained variance from now on.

    If moments learn from outputs, points teach so much that large batches need a short memory only.

    Lower when the explained variance drops beyond its sampling error, because the task has changed.
    Also lower at a new best: the noise of a step's outer products decreases with the unexplained
    energy, so weights by inverse variance discount older, noisier steps.

    Args:
        shaping: Options.
        now: Explained variance of this step.
        spread: Its standard error.
        running: Its running average, this step included.
        best: The best running average so far.
        points: Points of the step, if the moments learn from their outputs.
    """
    if shaping.decay is not None:
        return shaping.decay, best
    doubt = min(1.0, max(0.0, now + 4 * spread) / (FALL * best)) if best > 0 else 1.0
    progress = min(1.0, max(1e-6, 1 - running) / max(1e-6, 1 - best))
    keep = min(KEEP, max(LEAST_KEEP, KEEP ** (points / POINTS)))
    return keep * doubt * progress**2, max(best, running) if doubt == 1 else running


def explained_by_site(sums: StepSums) -> list[float]:
    """Measured share of each site's energy in this step.

    Residuals do not distinguish the sites, so their total is split in proportion to the energies of
    the isotropic estimates, minus their noise.
    """
    _, measured, missed = sums.sites.unbind(1)
    left = [max(1e-300, x) for x in missed.tolist()]
    scale = float(sums.fit[1]) / sum(left)
    pairs: Sequence[tuple[float, float]] = list(zip(measured.tolist(), left, strict=True))
    return [a / max(a + b * scale, 1e-300) for a, b in pairs]
