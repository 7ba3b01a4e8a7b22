"""Signals and traces for allocators, and how good counts are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flops.allocators import Bernoulli, Equal, Gaussian, Learner, Neyman, Signal, Traces
from flops.allocators.counts import objective

MAKERS: dict[str, Callable[..., Any]] = {
    "equal": Equal,
    "bernoulli": Bernoulli,
    "bernoulli-never": lambda **options: Bernoulli(p=0, **options),
    "bernoulli-always": lambda **options: Bernoulli(p=1, **options),
    "bernoulli-learned": lambda **options: Bernoulli(p=None, **options),
    "gaussian": Gaussian,
    "gaussian-standardised": lambda **options: Gaussian(feature="standardised", **options),
    "gaussian-diagonal": lambda **options: Gaussian(kernel=False, **options),
    "gaussian-pilot": lambda **options: Gaussian(pilot=2, **options),
    "neyman": Neyman,
    "neyman-pilot": lambda **options: Neyman(pilot=2, **options),
    "neyman-raw": lambda **options: Neyman(pilot=2, shrink=False, **options),
    "neyman-running": lambda **options: Neyman(running=True, **options),
}

learners = pytest.mark.parametrize("name", [n for n in MAKERS if isinstance(MAKERS[n](), Learner)])


def signal(
    losses: Any, mean: float = 8, unit: int = 1, minimum: int | None = None, **options: Any
) -> Signal:
    losses = torch.as_tensor(losses, dtype=torch.float64)
    budget = int(mean * len(losses)) // unit * unit
    options.setdefault("index", torch.arange(len(losses)))
    return Signal(losses, budget, unit, unit if minimum is None else minimum, "g", **options)


def traces(values: Any, draws: Any = 2) -> Traces:
    values = torch.as_tensor(values, dtype=torch.float64)
    counts = torch.as_tensor(draws, dtype=torch.float64).expand(len(values))
    return Traces(values, counts)


def sampled(true: Tensor, draws: int, seed: int) -> Traces:
    """Mean squares of as many normal derivatives of these variances."""
    source = torch.Generator().manual_seed(seed)
    w = torch.randn(draws, len(true), generator=source, dtype=torch.float64)
    return traces(w.square().mean(0) * true, draws)


def check(counts: Tensor, given: Signal) -> None:
    assert counts.dtype == torch.long
    assert counts.shape == given.losses.shape
    assert int(counts.sum()) == given.budget
    assert int(counts.min()) >= given.minimum
    assert not (counts % given.unit).any()


def relative_j(counts: Tensor | np.ndarray, true: Tensor) -> float:
    """J over that of equal counts."""
    counts, values = np.asarray(counts, dtype=float), true.double().numpy()
    return float(objective(values, counts) / objective(values, np.full(len(values), counts.mean())))
