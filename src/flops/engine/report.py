"""What a step reports: loss, queries, cost in forward equivalents, signal-to-noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flops.subspace.report import ShapingReport


class ForwardEquivalents(float):
    """Cost in forward passes of one point, with its parts.

    Attributes:
        clean: The noise-free pass, one per point.
        queries: Rows of the queries, each weighted by the part of the model that really ran.
        local: Local products: forward through the targets once, and twice that for the product.
        probe: The few rows that find out the structure of a new kind of input.
    """

    clean: float
    queries: float
    local: float
    probe: float

    def __new__(
        cls, clean: float = 0.0, queries: float = 0.0, local: float = 0.0, probe: float = 0.0
    ) -> ForwardEquivalents:
        """Sum the parts and keep them."""
        self = super().__new__(cls, clean + queries + local + probe)
        self.clean, self.queries, self.local, self.probe = clean, queries, local, probe
        return self

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {
            "clean": self.clean,
            "queries": self.queries,
            "local": self.local,
            "probe": self.probe,
        }


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
