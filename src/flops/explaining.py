"""What the answers of shaped queries say: each point's gradient, and what it still misses.

    delta = lift(c + tail) + eta * correction

c are the measured coordinates and tail the posterior mean of all others (`flops.posterior`): the
least squared error *of each point*. The correction is the isotropic queries' mean of held-out
residual times noise, which makes the mean over draws exact, and is far noisier. But errors of the
points that point the same way add up in a batch, while noise averages out; so eta is the share of
signal in the batch's summed correction, running over the steps: 0 if nothing coherent is missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.asking import Asked
from flops.posterior import posterior

RIDGES = (1 / 3, 1.0, 3.0)  # tried around the ridge in use, by leave-one-out residuals
LEAST = 1e-6  # of the noise in a fit, relative to its kernel


@dataclass(frozen=True)
class Explained:
    """Sums over the isotropic queries.

    Attributes:
        inside: Measured part of each gradient, shape (B, dimensions).
        tail: Posterior mean of the rest.
        outside: Plain estimate of all that was not asked, for learning.
        correction: What makes inside + tail unbiased.
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
        """Squared length of each gradient, shape (B,)."""
        return self.inside.square().sum(1) + self.missed


def explain(asked: Asked, ridge: float) -> Explained:
    """Fit the isotropic residuals, and sum up what they say about everything unasked."""
    space, known = asked.space, asked.known
    inside = known.lift(asked.c)
    tail, outside, correction = (torch.zeros_like(inside) for _ in range(3))
    missed, error = (torch.zeros(len(inside), dtype=inside.dtype) for _ in range(2))
    scores = torch.zeros(len(RIDGES), dtype=torch.float64)
    prior = torch.where(asked.measured, 0.0, asked.prior)
    flat = known.rest * (space.dimensions - known.size)
    for points, place, draw, z in asked.blocks():
        at = points[place]
        seen = z if space.mask is None else z * space.mask[at]
        e = known.coordinates(seen)
        r = asked.w[at, draw] - (asked.c[at] * e).sum(1)
        count = asked.iso[points].unsqueeze(1)

        def pad(values: Tensor, place: Tensor = place, draw: Tensor = draw) -> Tensor:
            shape = (int(place[-1]) + 1, int(draw.max()) + 1, *values.shape[1:])
            return torch.zeros(shape, dtype=values.dtype).index_put_((place, draw), values)

        residuals, real = pad(r), pad(torch.ones_like(draw)).bool()
        padded = pad(e)
        kernel = (padded * prior[points].unsqueeze(1)) @ padded.transpose(1, 2)
        if known.rest > 0:
            whole = pad(seen)
            gram = whole @ whole.transpose(1, 2) - padded @ padded.transpose(1, 2)
            kernel = kernel + known.rest * gram
        # What the prior expects outside, times the ridge: the prior itself is not exact.
        noise = ridge * (prior[points].sum(1) + flat) + LEAST
        fits = [posterior(kernel, residuals, noise * factor, real) for factor in RIDGES]
        squares = residuals.square().sum(1, keepdim=True).clamp(min=1e-300)
        for i, one in enumerate(fits):  # each point counts by its number of queries
            scores[i] += (one.held_out.square() / squares * count).double().sum()
        fit = fits[1]
        weights = [fit.alpha, fit.without - fit.alpha, residuals / count, fit.held_out / count]
        by_row = torch.zeros(len(weights), len(points), len(place), dtype=r.dtype)
        by_row[:, place, torch.arange(len(place))] = torch.stack(weights)[:, place, draw]
        in_e = by_row[:3] @ e
        in_z = by_row[:3] @ seen
        rest = known.rest * (in_z[:2] - known.lift(in_e[:2].flatten(0, 1)).view_as(in_z[:2]))
        fitted = known.lift((prior[points] * in_e[:2]).flatten(0, 1)).view_as(rest) + rest
        tail[points] = fitted[0]
        correction[points] = fitted[1] + by_row[3] @ z
        outside[points] = in_z[2] - known.lift(torch.where(asked.measured[points], in_e[2], 0.0))
        missed[points] = (residuals.square() / count).sum(1)
        error[points] = (fit.held_out.square() / count).sum(1)
    next_ridge = min(100.0, max(1e-4, ridge * RIDGES[int(scores.argmin())]))
    return Explained(inside, tail, outside, correction, missed, error, next_ridge)


def coherence(asked: Asked, found: Explained) -> tuple[float, float]:
    """Squared length of the batch's summed correction, and the part of it that is noise."""
    live = asked.iso > 0
    noise = (found.error * asked.space.dimensions)[live] / asked.iso[live]
    return float(found.correction.sum(0).square().sum()), float(noise.sum())
