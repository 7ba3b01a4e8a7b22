"""Statistical assertions with a stated false-alarm rate.

K replicates of an estimate are compared with the truth along the truth itself and along fixed
random directions. Under a correct estimator a deviation of 5 standard errors has a probability of
about 1e-5 (t distribution with 31 degrees of freedom: 2e-5), so with 20 directions a test raises a
false alarm once in some thousand *choices of seed*; seeds are fixed, so a green test stays green.
The standard error along the truth must be small against it: a wide interval cannot pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

REPLICATES = 32
DIRECTIONS = 20


def assert_mean(samples: Tensor, truth: Tensor, relative: float = 0.12) -> None:
    """The mean of the samples (K, P) is the truth (P,)."""
    assert len(samples) >= REPLICATES
    norm = truth.norm()
    source = torch.Generator().manual_seed(0)
    random = torch.randn(DIRECTIONS, len(truth), generator=source, dtype=truth.dtype)
    directions = torch.cat([truth.unsqueeze(0) / norm, random / random.norm(dim=1, keepdim=True)])
    seen = samples @ directions.T  # (K, 1 + DIRECTIONS)
    error = seen.std(0) / len(samples) ** 0.5
    deviation = (seen.mean(0) - directions @ truth).abs()
    assert error[0] < relative * norm, f"too noisy to tell: {error[0] / norm:.3f} of the truth"
    worst = (deviation / error.clamp(min=1e-30)).max()
    assert worst < 5, f"the mean is {worst:.1f} standard errors off the truth"
