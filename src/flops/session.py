"""A session: one batch after its clean pass, from which every query starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flops.distributed import Team
from flops.layout import Layout
from flops.queries import Ledger, Queries
from flops.replay import Passes, Record


@dataclass
class Session:
    """What a step knows about its batch.

    Attributes:
        layout: Structure of the forward pass and the estimators' bindings.
        passes: Passes over this batch.
        record: Clean outputs that are replayed.
        losses: Clean losses, shape (B,); NaN if the clean pass was left out.
        places: Positions of the points in the data set, if given.
        probe: Rows that were needed to find the layout.
        chunk: Most rows in one pass.
        cost: Forward equivalents of the clean pass.
        team: Processes that share the rows.
        ledger: What all queries of the session cost.
    """

    layout: Layout
    passes: Passes
    record: Record
    losses: Tensor
    places: Tensor | None
    probe: int
    chunk: int
    cost: float
    team: Team
    ledger: Ledger = field(default_factory=Ledger)

    def queries(
        self, group: str, key: tuple[int, ...], memory: dict[str, Any], counts: Tensor | None = None
    ) -> Queries:
        """Queries of one group; counts are filled in when they are known."""
        size = len(self.losses)
        ids = torch.arange(size) if self.places is None else self.places
        none = torch.zeros(size, dtype=torch.long)
        return Queries(
            group,
            self.passes,
            self.record,
            self.losses,
            none if counts is None else counts,
            key,
            ids.tolist(),
            self.chunk,
            self.ledger,
            memory,
            self.team,
        )
