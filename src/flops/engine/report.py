"""Report of a step: loss, queries, cost in forward equivalents, signal-to-noise ratio."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flops.engine.rows import ForwardEquivalents
from flops.subspace.report import ShapingReport


@dataclass(frozen=True)
class StepReport:
    """Results and cost of one step.

    Attributes:
        loss: Mean clean loss of the batch; of the queries, without a clean pass (MeZO).
        queries: Perturbed rows, over all groups.
        forward_equivalents: Cost in passes of one point; its parts are attributes.
        counts: Queries of each point of this process, shape (B,), by group.
        dropped: Points without a query (with ``min_queries=0``), by group.
        snr: Signal-to-noise ratio of the gradient estimate, by group.
        seconds: Time of the step.
        shaping: State of shaped noise, by group.
        cosine: Cosine to the exact gradient, by group; empty unless ``exact=True``.
        failed: Rows that a black box failed to evaluate, and that are left out.
        points: Points of the step, on all data-parallel ranks.
    """

    loss: float
    queries: int
    forward_equivalents: ForwardEquivalents
    counts: dict[str, Tensor]
    dropped: dict[str, int]
    snr: dict[str, float]
    seconds: float
    shaping: dict[str, ShapingReport] = field(default_factory=dict)
    cosine: dict[str, float] = field(default_factory=dict)
    failed: int = 0
    points: int = 0
