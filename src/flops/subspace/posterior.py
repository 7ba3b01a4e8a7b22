"""What isotropic slopes say about the directions nobody asked: a posterior mean.

Given the coordinates measured directly, a slope of isotropic noise z leaves the residual
r = <g, z>, g the part of the gradient in all other directions. With the prior g ~ N(0, e Lambda),
e the point's energy, the posterior mean is Lambda Z^T alpha with alpha = (Z Lambda Z^T + N)^-1 r:
ridge regression with the learned covariance as its metric. Leave-one-out residuals follow from the
same inverse: alpha_i / (K + N)^-1_ii.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    Args:
        kernel: Z Lambda Z^T at unit energy, shape (b, n, n).
        r: Residuals, shape (b, n).
        noise: Variance of a residual that the prior does not explain, at unit energy, shape (b,).
        real: Which entries are queries, shape (b, n).
    """
    both = real.unsqueeze(1) & real.unsqueeze(2)
    noise = torch.where(real, noise.unsqueeze(1), 1.0)
    # With a narrow prior and little noise the system is almost singular: double precision.
    system = torch.where(both, kernel, 0.0).double() + torch.diag_embed(noise.double())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
    alpha = (inverse @ r.double().unsqueeze(2)).squeeze(2)
    held_out = torch.where(real, alpha / inverse.diagonal(dim1=1, dim2=2), 0.0)
    # The fit without query i has the weights alpha - (K + N)^-1_i held_out_i, zero for i itself.
    shares = held_out / real.sum(1, keepdim=True).clamp(min=1)
    without = torch.where(real, alpha - (inverse @ shares.unsqueeze(2)).squeeze(2), 0.0)
    return Posterior(torch.where(real, alpha, 0.0).to(r), held_out.to(r), without.to(r))
