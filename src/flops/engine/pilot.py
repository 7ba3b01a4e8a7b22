"""Pilots: queries that an allocator learns from before it allocates the rest of the budget.

Counts must not depend on the noise they weight. Without a pilot the allocator learns from a step
for the next one. With a pilot of q queries per point (charged to the budget) it learns on the same
batch, and the two estimates are combined with weights fixed in advance,

    g = a g_pilot + (1 - a) g_later,   a = q / (q + mean later count),

never pooled by 1/A_j, which would bias the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flops.allocators.base import Signal
from flops.errors import QueryError
from flops.estimators.base import Estimate, Estimation, Queries, Runner
from flops.estimators.variance import Collected
from flops.passes.local_vjp import Gradients

PILOT = 7  # in the key of the pilot's noise


class Pilot:
    """The pilot queries of a group in a step.

    Args:
        queries: Pilot queries per point, rounded up to the estimator's unit.
        signal: Inputs of the allocator.
        given: The group's queries.

    Attributes:
        counts: Queries of each point, shape (B,).
        given: The group's queries, with these counts and a separate key.
        rest: The signal with the rest of the budget.
        gradients: The pilot's gradients.
        estimate: The pilot's statistics; None before `finish`.
        share: Weight a of the pilot's gradients.

    Raises:
        QueryError: If the rest of the budget is too small.
    """

    def __init__(self, queries: int, signal: Signal, given: Queries) -> None:
        unit, size = signal.unit, given.size
        self.counts = torch.full((size,), -(-queries // unit) * unit)
        left = signal.budget - int(self.counts.sum())
        if left < max(unit, signal.minimum) * size:
            raise QueryError(
                f"group '{signal.group}': a pilot of {queries} leaves {left} of "
                f"{signal.budget} queries for {size} points; raise `queries` or lower the pilot"
            )
        self.given = replace(given, counts=self.counts, key=(*given.key, PILOT))
        self.rest = replace(signal, budget=left)
        self.gradients: Gradients = {}
        self.estimate: Estimate | None = None
        self.share = 0.0

    def finish(
        self, estimation: Estimation, runner: Runner, parameters: Sequence[nn.Parameter]
    ) -> Estimate:
        """Compute the pilot's gradients and statistics."""
        found, replicas = Collected(), runner.replicas
        estimation.write(found, runner, 1.0 if estimation.joint else replicas.share)
        self.gradients = found.gradients
        if estimation.partial:
            self.gradients = runner.sum_gradients(found.gradients, parameters)
        if not estimation.joint:
            self.gradients = replicas.sum_gradients(self.gradients, parameters)
        self.estimate = estimation.finish()
        return self.estimate

    def weigh(self, later: Tensor) -> None:
        """Set the weight, which must not depend on the distribution of the later counts."""
        self.share = pilot_share(self.counts, later)


def pilot_share(first: Tensor, later: Tensor) -> float:
    """Weight of the pilot's gradient, from its counts and those of the later queries."""
    return float(first[0]) / (float(first[0]) + float(later.double().mean()))
