"""A session: one batch after its clean pass, from which every query starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flops.engine.collectives import Team
from flops.engine.layout import Layout, Layouts
from flops.engine.meetings import Work, completed
from flops.engine.queries import Ledger, Queries
from flops.passes.batch import Batch
from flops.passes.checks import (
    RandomState,
    check_deterministic,
    check_finite,
    no_autocast_cache,
    slow_attention_path,
)
from flops.passes.replay import Passes, Record

T = TypeVar("T")


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
    record: dict[int, list[Any]]
    losses: Tensor
    probe: int
    chunk: int
    cost: float
    team: Team
    places: Tensor | None = None
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

    def in_turn(self, works: Iterable[Work[T]]) -> list[T]:
        """Complete the work of each group; what no later group replays is forgotten."""
        done = []
        for number, work in enumerate(works):
            done.append(completed(work))
            later = [binding.needed for binding in self.layout.bindings[number + 1 :]]
            for call in self.record.keys() - frozenset().union(*later):
                del self.record[call]
        return done


@contextmanager
def opened(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    layouts: Layouts,
    batch: Batch,
    reads: Callable[[Layout], bool] | None,
    rows: Callable[[Layout], int],
    team: Team,
) -> Iterator[Session]:
    """Look at the batch, make its clean pass, and restore the random state in the end.

    Args:
        model: The model.
        modules: Its modules by name.
        layouts: What is known about it.
        batch: The points.
        reads: Whether anything reads the clean pass; None makes it in any case.
        rows: Most rows in one pass.
        team: Processes that share the rows.
    """
    state = RandomState()
    try:
        with slow_attention_path(), no_autocast_cache():
            layout, probe = layouts.find(batch, state)
            passes = Passes(model, modules, layout.structure, batch)
            with torch.no_grad():
                record: Record = {}
                losses, cost = torch.full((batch.size,), torch.nan), 0.0
                losses = losses.to(layout.structure.losses.dtype)
                if reads is None or reads(layout):
                    losses, record = passes.clean(layout.needed, layout.embedding)
                    cost = float(batch.size)
                    check_deterministic(state, modules)
                    losses = team.first(losses)
                    check_finite(losses, "the clean pass")
                yield Session(layout, passes, dict(record), losses, probe, rows(layout), cost, team)
            check_deterministic(state, modules)
    finally:
        state.restore()
