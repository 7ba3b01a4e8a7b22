"""Traces from per-draw gradients, as in the paper; a check of the scalar formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Signal
from flops.allocators.fixed import Fixed
from flops.diagnostics.spend import Spent, spend
from flops.engine.groups import ResolvedGroup
from flops.engine.step import Session
from flops.estimators.base import Queries


def spend_counts(
    session: Session, group: ResolvedGroup, binding: Any, queries: Queries, counts: Tensor
) -> Spent:
    """Estimate a group with given counts."""
    signal = Signal(queries.losses, int(counts.sum()), group.estimator.unit, 0, group.name)
    return spend(session, group, binding, Fixed(counts), signal, queries)


def gradient_traces(
    session: Session,
    group: ResolvedGroup,
    binding: Any,
    queries: Queries,
    draws: int,
    parameters: Sequence[nn.Parameter] | None = None,
) -> Tensor:
    """Tr_j as the total sample variance of the per-draw gradients.

    This costs a local VJP per draw.

    Args:
        session: The batch.
        group: The group, whose estimator has independent draws.
        binding: Binding of its estimator to the model.
        queries: The group's queries.
        draws: Draws per point, at least 2.
        parameters: Parameters to include (the paper subsamples); all by default.

    Returns:
        Traces, shape (B,).
    """
    found = torch.zeros(queries.size, dtype=torch.float64)
    for point in range(queries.size):
        counts = torch.zeros(queries.size, dtype=torch.long)
        counts[point] = group.estimator.unit
        samples = []
        for draw in range(draws):
            one = replace(queries, key=(*queries.key, draw))
            gradients = spend_counts(session, group, binding, one, counts).gradients
            wanted = gradients if parameters is None else parameters
            # The estimate is of the batch mean, in which a point has the weight 1/B.
            flat = [queries.size * gradients[p].double().flatten() for p in wanted]
            samples.append(torch.cat(flat))
        found[point] = torch.stack(samples).var(0).sum()
    return found
