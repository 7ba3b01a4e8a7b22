"""What a step reports: loss, queries, cost in forward equivalents, signal-to-noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


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
class SiteReport:
    """Shaped noise at one site.

    Attributes:
        site: Name of the perturbed module or parameter.
        k: Directions that a point was asked in here, on average over the points.
        captured: Held-out estimate of the share of the gradient's energy in these directions,
            over the last steps; 0 before the first shaped step.
    """

    site: str
    k: float
    captured: float


@dataclass(frozen=True)
class ShapingReport:
    """Shaped noise in one group.

    Attributes:
        k: Directions that a point was asked in, on average over the points.
        captured: Held-out estimate of the share of the gradient's energy that was measured.
        explore: Share of isotropic queries.
        correction: Weight of the unbiased correction, between 0 and 1.
        sites: The same by site.
    """

    k: float
    captured: float
    explore: float
    correction: float
    sites: tuple[SiteReport, ...]


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
