"""Queries and cost of a run, and what its logs say about the estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flops.engine.report import StepReport


@dataclass
class Totals:
    """Sums over a run, and means since the last log.

    Attributes:
        points: Points that were trained on, each as often as it was.
        queries: Rows run under noise.
        parts: Forward equivalents by part: clean, queries, local, probe.
    """

    points: int = 0
    queries: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[str, list[float]] = {}

    @property
    def forward_equivalents(self) -> float:
        """Cost of the run in forward passes of one point."""
        return math.fsum(self.parts.values())

    def add(self, report: StepReport) -> None:
        """Count a micro-batch, of all processes."""
        self.points += report.points
        self.queries += report.queries
        for name, cost in report.forward_equivalents.parts().items():
            self.parts[name] = self.parts.get(name, 0.0) + cost
        for group, snr in report.snr.items():
            self._seen.setdefault(f"snr/{group}", []).append(snr)
        for group, shaped in report.shaping.items():
            explained = shaped.explained_variance
            self._seen.setdefault(f"explained_variance/{group}", []).append(explained)

    def sums(self) -> dict[str, float]:
        """Queries and forward equivalents of the run so far."""
        return {"queries": self.queries, "forward_equivalents": self.forward_equivalents}

    def means(self) -> dict[str, float]:
        """Means of what was seen since the last call, by group; what is not finite is left out."""
        found = {}
        for name, values in self._seen.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                found[name] = math.fsum(finite) / len(finite)
        self._seen = {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Totals:
        """Continue from `state_dict`."""
        return cls(int(state["points"]), int(state["queries"]), dict(state["parts"]))
