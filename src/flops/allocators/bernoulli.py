"""Bernoulli allocation (the paper's BA): counts of easy points are halved at random.

    P(A_j = Abar / 2) = p  if l_j < mean loss,  0 otherwise;

pruned queries are distributed equally over the other points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.allocators.base import Learner, Signal, Traces
from flops.allocators.counts import Array, feasible, measured, objective, round_counts
from flops.perturb.random import mix


@dataclass
class Bernoulli(Learner):
    """Prunes points of below-average loss to half of their queries with probability p.

    Args:
        p: The probability; None learns it by the score gradient of J.
        min_queries: Minimum queries of a point.
        samples: Allocations sampled per update of a learned p.
    """

    p: float | None = 0.5
    min_queries: int = 1
    samples: int = 32
    _logit: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.p is not None and not 0 <= self.p <= 1:
            raise ValueError(f"p must lie between 0 and 1, not {self.p}")
        if self.samples < 4 or self.min_queries < 0:
            raise ValueError("samples >= 4 and min_queries >= 0 are needed")

    @property
    def probability(self) -> float:
        """The probability in use, given or learned."""
        return self.p if self.p is not None else float(1 / (1 + np.exp(-self._logit)))

    def allocate(self, signal: Signal) -> Tensor:
        """Sample which easy points are pruned."""
        rng = np.random.default_rng(mix(*signal.key, 1))
        easy = _easy(signal)
        pruned = easy & (rng.random(len(easy)) < self.probability)
        shares = torch.from_numpy(_shares(pruned[None])[0])
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)

    def learn(self, signal: Signal, traces: Traces) -> None:
        """One step of the score gradient of log J with respect to the logit of p."""
        if self.p is not None:
            return
        signal, traces = measured(signal, traces)
        values = traces.values.double().numpy()
        if len(values) < 2 or values.max() <= 0:
            return  # all points look equal
        rng = np.random.default_rng(mix(*signal.key, 2))
        easy = _easy(signal)
        pruned = easy & (rng.random((self.samples, len(easy))) < self.probability)
        counts = feasible(_shares(pruned), float(signal.budget), float(signal.minimum))
        cost = np.log(objective(values / values.max(), counts))
        score = (pruned - self.probability)[:, easy].sum(axis=1)
        gradient = float(((cost - cost.mean()) * score).mean())
        self._logit = float(np.clip(self._logit - 0.2 * np.sign(gradient), -4, 4))

    def state_dict(self) -> dict[str, Any]:
        """The learned logit."""
        return {"logit": self._logit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the learned logit."""
        self._logit = float(state["logit"])


def _easy(signal: Signal) -> Any:
    losses = signal.losses.double().numpy()
    # The mean of equal numbers may be rounded to just above them.
    return (losses < losses.mean()) & (losses < losses.max())


def _shares(pruned: Any) -> Array:
    """Relative counts: 1/2 for pruned points, and an equal share of the rest for the others."""
    size = pruned.shape[-1]
    dropped = pruned.sum(axis=-1, keepdims=True)
    rest = (size - dropped / 2) / np.maximum(size - dropped, 1)
    return np.where(pruned, 0.5, rest)
