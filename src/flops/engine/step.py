"""One step: queries of all groups at the same parameters, then the gradients.

Phase 1: clean pass, allocation, and the queries of all groups (`flops.engine.group_step`,
`flops.engine.query_loop`). Nothing is written.
Phase 2: gradients, group by group and parameter by parameter (`flops.engine.gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flops.engine.gradients import Update, Writer
from flops.engine.group_step import GroupStep
from flops.engine.layout import Layout
from flops.engine.query_loop import QueryLoop, Run, run_query
from flops.engine.rows import Cost, LocalRunner
from flops.estimators.base import Queries
from flops.passes.local_vjp import Gradients
from flops.passes.loss_view import LossView
from flops.passes.ranks import Ranks, Replicas
from flops.passes.replay import Passes


@dataclass
class Session:
    """A batch after its clean pass, from which every query starts.

    Attributes:
        layout: Structure of the forward pass and the estimators' bindings.
        passes: Passes over this batch.
        record: Clean outputs that are replayed.
        losses: Clean losses, shape (B,); NaN without a clean pass.
        index: Positions of the points in the data set, if given.
        chunk: Largest number of rows in one pass.
        ranks: Ranks that share the rows.
        replicas: Ranks with other points of the same step.
        clean: Forward equivalents of the clean pass.
        probe: Cost of finding the layout, in passes of one row.
        view: What the loss reads of the outputs, for estimators that do, too.
        cost: Cost of all queries of the session.
    """

    layout: Layout
    passes: Passes
    record: dict[int, list[Any]]
    losses: Tensor
    index: Tensor | None
    chunk: int
    ranks: Ranks
    replicas: Replicas
    clean: float
    probe: float
    view: LossView | None = None
    cost: Cost = field(default_factory=Cost)

    @property
    def size(self) -> int:
        """Points of the batch."""
        return len(self.losses)

    def queries(self, group: str, key: tuple[int, ...], memory: dict[str, Any]) -> Queries:
        """Queries of one group; counts are set by the allocation."""
        size, first = len(self.losses), self.replicas.offset
        ids = list(range(first, first + size)) if self.index is None else self.index.tolist()
        none = torch.zeros(size, dtype=torch.long)
        recorded = frozenset(self.record)
        return Queries(group, size, self.losses, none, key, ids, memory, recorded, view=self.view)

    def runner(self, cost: Cost) -> LocalRunner:
        """A runner of this batch's rows."""
        size = len(self.losses)
        return LocalRunner(
            self.passes, self.record, size, self.chunk, cost, self.ranks, self.replicas
        )


def run_queries(steps: Sequence[GroupStep], session: Session, run: Run = run_query) -> None:
    """Phase 1: run all queries of the groups."""
    several = session.replicas.several
    loop = QueryLoop(steps, len(session.losses), session.chunk, session.ranks, several)
    while (query := loop.next()) is not None:
        loop.tell(query, run(query))


def writer_of(steps: Sequence[GroupStep], session: Session, update: Update | None = None) -> Writer:
    """Writer of these groups' gradients, to ``.grad`` or to an update."""
    named = {step.group.name: step.group.parameters for step in steps}
    bindings = zip(steps, session.layout.bindings, strict=True)
    spans = {step.group.name: binding.local_span for step, binding in bindings}
    return Writer(named, spans, session.layout.structure, update)


def write_gradients(
    steps: Sequence[GroupStep],
    session: Session,
    writer: Writer,
    exact: Gradients | None = None,
    scale: float = 1.0,
) -> None:
    """Phase 2: the gradients of all groups, the last group first; `Writer.commit` ends it.

    A group's local pass stops after its own targets, so that parameters that were stepped by a hook
    are not read again.
    """
    for number, step in reversed(list(enumerate(steps))):
        # Free outputs that no later VJP replays.
        later = [binding.local_needed for binding in session.layout.bindings[: number + 1]]
        for call in session.record.keys() - frozenset().union(*later):
            del session.record[call]
        step.write(writer, exact, scale)
        session.cost.add(step.cost)
