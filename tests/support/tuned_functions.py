"""Plain functions for a tuner, and a tuner for each estimator and allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from flops import ES, SPSA, LikelihoodRatio, Shaping
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman
from flops.blackbox import Objective, Tuner

D, N = 6, 5
A = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
START = torch.linspace(-1, 1, D)


def linear(parameters: Tensor, points: Tensor) -> Tensor:
    return (parameters.double() * A[points].double()).sum(1) + points


def quadratic(parameters: Tensor, points: Tensor) -> Tensor:
    """Its minimum is another one at every point."""
    scale = torch.arange(1, D + 1)
    return 0.5 * (scale * (parameters.double() - A[points]).square()).sum(1)


ALLOCATORS = {
    "equal": Equal(),
    "fixed": Fixed([2, 4, 6, 8, 10]),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(kernel=False),
    "kernel": Gaussian(),
    "neyman": Neyman(),
    "pilot": Neyman(pilot=2),
}
KINDS = {
    "lr": LikelihoodRatio(0.1),
    "es": ES(0.1),
    "spsa": SPSA(0.1),
    "shaped-lr": LikelihoodRatio(0.1, shaping=Shaping()),
    "shaped-spsa": SPSA(0.1, shaping=Shaping()),
}


def make(objective: Objective | None = quadratic, kind="lr", allocator="equal", **options) -> Tuner:
    settings = {"queries": 6.0, "learning_rate": 0.05, "embeddings": A} | options
    return Tuner(
        START,
        objective,
        points=N,
        estimator=KINDS[kind] if isinstance(kind, str) else kind,
        allocator=ALLOCATORS[allocator],
        **settings,
    )
