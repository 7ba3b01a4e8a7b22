"""The posterior mean of a point's gradient coordinates from the slopes of its queries.

Slopes are w = E c + noise with c ~ N(0, energy * Lambda): ridge regression, solved for all points
at once. Leave-one-out residuals follow from the same inverse, without fitting again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Posterior:
    """What the queries of every point say about its coordinates.

    Attributes:
        mean: c = Lambda E^T (E Lambda E^T + N)^-1 w, shape (B, k).
        covariance: Variance that is left of each coordinate at unit energy, shape (B, k).
        energy: Energy of each point's gradient, shape (B,).
        plain: w - E c, residuals of the fit, shape (B, A).
        held_out: Leave-one-out residuals, shape (B, A).
        doubt: Their variance at unit energy that comes from the fit, not from what the subspace
            misses, shape (B, A).
        left_out: Mean over the isotropic queries of c fitted without each, shape (B, k).
    """

    mean: Tensor
    covariance: Tensor
    energy: Tensor
    plain: Tensor
    held_out: Tensor
    doubt: Tensor
    left_out: Tensor


def posterior(
    e: Tensor, w: Tensor, noise: Tensor, real: Tensor, iso: Tensor, prior: Tensor
) -> Posterior:
    """Ridge regression of slopes on coordinates, for all points at once.

    Args:
        e: Coordinates of the queries, (B, A, k); rows of padding are zero.
        w: Slopes, (B, A), zero in padding.
        noise: Variance of a slope at unit energy that the subspace does not explain, (B, A).
        real: Which rows are queries, (B, A).
        iso: Which of them are isotropic, (B, A).
        prior: Energy share of each direction, (k,).
    """
    spread = e * prior
    system = spread @ e.transpose(1, 2) + torch.diag_embed(torch.where(real, noise, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
    alpha = (inverse @ w.unsqueeze(2)).squeeze(2)  # (B, A)
    mean = (spread.transpose(1, 2) @ alpha.unsqueeze(2)).squeeze(2)  # (B, k)
    gain = inverse @ spread  # (B, A, k)
    covariance = (prior - (gain * spread).sum(1)).clamp(min=0)
    count = real.sum(1).clamp(min=1)
    energy = ((w * alpha).sum(1) / count).clamp(min=0)
    diagonal = inverse.diagonal(dim1=1, dim2=2)
    held_out = torch.where(real, alpha / diagonal, 0.0)
    # Without query i: c_-i = c - Lambda E^T K^-1 e_i alpha_i / K^-1_ii.
    weight = torch.where(iso, held_out, 0.0) / iso.sum(1, keepdim=True).clamp(min=1)
    left_out = mean - (gain * weight.unsqueeze(2)).sum(1)
    plain = w - (e @ mean.unsqueeze(2)).squeeze(2)
    doubt = torch.where(real, 1 / diagonal - noise, 0.0).clamp(min=0)
    return Posterior(mean, covariance, energy, plain, held_out, doubt, left_out)
