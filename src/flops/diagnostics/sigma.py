"""The sigma sweep: large enough for rounding, small enough for linearity.

Directional derivatives along the same noise do not depend on sigma while the loss is linear. Small
sigmas change them by rounding, large ones by curvature. The recommended sigma is the one whose
derivatives differ least from those of its neighbours; no exact gradient is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flops.diagnostics.spend import Spent
from flops.engine.groups import ResolvedGroup
from flops.estimators.exact import cosine
from flops.passes.local_vjp import Gradients


@dataclass(frozen=True)
class SigmaRow:
    """One group at one sigma.

    Attributes:
        change: Relative change of the derivatives from the neighbouring sigmas; lower is better.
        rounding_units: Median loss difference over the rounding of the loss.
        recommended: Whether this is the sigma with the least change.
    """

    group: str
    sigma: float
    change: float
    rounding_units: float
    cosine: float
    recommended: bool


def sweep(
    group: ResolvedGroup,
    estimate: Callable[[ResolvedGroup, Tensor], Spent],
    losses: Tensor,
    sigmas: Sequence[float],
    exact: Gradients | None,
) -> list[SigmaRow]:
    """Four draws per point at each sigma, with the same noise.

    Args:
        group: A group whose estimator has a sigma.
        estimate: Estimates a group with given counts, always with the same noise.
        losses: Clean losses, shape (B,).
        sigmas: At least three, in any order.
        exact: The exact gradient, for the cosine.
    """
    estimator: Any = group.estimator
    derivatives, cosines = [], []
    ordered = sorted(sigmas)
    counts = torch.full((len(losses),), max(4 * estimator.unit, estimator.minimum_queries))
    for sigma in ordered:
        changed = dataclasses.replace(group, estimator=dataclasses.replace(estimator, sigma=sigma))
        spent = estimate(changed, counts)
        derivatives.append(spent.step.estimate.derivatives.double())
        cosines.append(cosine(spent.gradients, exact))
    if any(len(found) == 0 for found in derivatives):
        return []
    steps = [_relative(a, b) for a, b in pairwise(derivatives)]
    changes = [max(steps[max(0, i - 1) : i + 1], default=torch.inf) for i in range(len(ordered))]
    # The ends have only one neighbour, so they are never recommended.
    inner = range(1, len(ordered) - 1) if len(ordered) > 2 else range(len(ordered))
    best = min(inner, key=lambda i: changes[i])
    unit = torch.finfo(losses.dtype).eps * max(1.0, float(losses.abs().median()))
    return [
        SigmaRow(
            group.name,
            sigma,
            changes[i],
            float((derivatives[i] * sigma).abs().median()) / unit,
            cosines[i],
            i == best,
        )
        for i, sigma in enumerate(ordered)
    ]


def _relative(a: Tensor, b: Tensor) -> float:
    scale = float(torch.minimum(a.square().mean(), b.square().mean()).sqrt())
    return float((a - b).square().mean().sqrt()) / scale if scale > 0 else torch.inf
