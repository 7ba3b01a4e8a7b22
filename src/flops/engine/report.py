"""What a step reports: loss, queries, cost in forward equivalents, signal-to-noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flops.engine.rows import ForwardEquivalents
from flops.subspace.report import ShapingReport


@dataclass(frozen=True)
class StepReport:
    """What one step saw and cost.

    Attributes:
        loss: Mean clean loss of the batch; of the queries, where no clean pass is made (MeZO).
        queries: Rows run under noise, over all groups.
        forward_equivalents: Cost in passes of one point; its parts are attributes.
        counts: Queries of each point, shape (B,), by group.
        dropped: Points that got no query at all (with ``min_queries=0``), by group.
        snr: Signal-to-noise ratio of the gradient estimate, by group.
        seconds: Time of the step.
        shaping: What shaped noise knows, by group that has it.
        cosine: Cosine to the exact gradient, by group; empty unless asked for.
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
