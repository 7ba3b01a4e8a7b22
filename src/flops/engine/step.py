"""One step: queries of all groups at the same parameters, then the gradients.

Phase 1: clean pass, allocation (`flops.engine.group_step`), and the queries of all groups. Every
group plans rows; they run chunk by chunk, anywhere; and ranks synchronise once per round. Nothing
is written.
Phase 2: gradients, group by group and parameter by parameter. Without hooks, nothing is written
before all of them are known; with hooks, see `flops.engine.gradients`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flops.engine.gradients import HOOKS, Streaming, Update, Writer
from flops.engine.group_step import GroupStep
from flops.engine.layout import Layout
from flops.engine.report import StepReport
from flops.engine.rows import Cost, ForwardEquivalents, LocalRunner, gathered, own_chunks
from flops.engine.shared_clean_pass import shared_clean_pass, worth_sharing
from flops.estimators.base import Perturbation, Plan, Queries, RowResults, Rows
from flops.passes.batch import check_finite
from flops.passes.local_vjp import Gradients, accumulate, add_gradients
from flops.passes.loss_view import LossView, loss_view
from flops.passes.ranks import Ranks, Replicas
from flops.passes.replay import Passes
from flops.perturb.draws import Draws


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


@dataclass(frozen=True)
class Query:
    """A chunk of rows of one group to run."""

    step: GroupStep
    rows: Rows
    perturbation: Perturbation


class QueryLoop:
    """All queries of a step: `next` returns a query to run, `tell` takes its results.

    Args:
        steps: The groups.
        size: Points of the batch.
        chunk: Largest number of rows of a query.
        ranks: Ranks that share the rows.
        together: Whether all groups run before any of them is collected, which several ranks do to
            wait for each other once; else one group after the other.
    """

    def __init__(
        self,
        steps: Sequence[GroupStep],
        size: int,
        chunk: int,
        ranks: Ranks,
        together: bool = False,
    ) -> None:
        self._steps, self._size, self._chunk, self._ranks = steps, size, chunk, ranks
        self._together = together or ranks.size > 1
        self._queue: deque[tuple[int, Rows]] = deque()
        self._round: dict[int, Plan] = {}
        self._values: dict[int, list[Tensor]] = {}

    def next(self) -> Query | None:
        """The next query; None after the last of all groups."""
        while not self._queue:
            if not self._advance():
                return None
        number, rows = self._queue.popleft()
        step = self._steps[number]
        return Query(step, rows, step.estimation.ask(rows))

    def tell(self, query: Query, results: RowResults) -> None:
        """Take the results of a query, and charge its group."""
        step, count = query.step, len(query.rows.points)
        step.cost.rows += count
        share = 1 - query.perturbation.prefix.share
        step.cost.queries += count * share * step.group.estimator.work
        values = step.estimation.tell(query.rows, results)
        self._values[self._steps.index(step)].append(values)

    def _advance(self) -> bool:
        """Synchronise the ranks, and collect the next plans."""
        if self._round:
            self._synchronise()
        self._round = {}
        for number, step in enumerate(self._steps):
            plan = step.plan()
            if plan is not None:
                self._round[number] = plan
                if not self._together:  # no other ranks: one group's noise at a time
                    break
        self._values = {number: [] for number in self._round}
        for number, plan in self._round.items():
            chunks = own_chunks(plan, self._size, self._chunk, self._ranks)
            self._queue.extend((number, rows) for rows in chunks)
        if self._ranks.size > 1 and not self._round:
            self._sum_costs()
        return bool(self._round)

    def _synchronise(self) -> None:
        found = gathered(
            [(p, self._values[n], self._steps[n].estimation) for n, p in self._round.items()],
            self._size,
            self._ranks,
        )
        for number, (values, points) in zip(self._round, found, strict=True):
            step = self._steps[number]
            if self._ranks.size > 1:  # on all ranks
                losses = values if values.dim() == 1 else values[:, 0]
                check_finite(losses, f"queries of group '{step.group.name}'", points)
            step.estimation.collect(values, points, step.runner)

    def _sum_costs(self) -> None:
        """Sum costs over the ranks."""
        costs = [value for s in self._steps for value in (float(s.cost.rows), s.cost.queries)]
        found = iter(self._ranks.sum_scalars(costs))
        for step in self._steps:
            step.cost.rows, step.cost.queries = round(next(found)), next(found)


def clean_pass(
    passes: Passes,
    layout: Layout,
    reads: bool,
    ranks: Ranks,
    check: Callable[[], None],
    view: bool,
) -> tuple[Tensor, dict[int, list[Any]], LossView | None]:
    """Losses, recorded calls and the loss's view of the clean pass, the same on all ranks.

    Args:
        passes: Passes over the batch.
        layout: Its layout.
        reads: Whether anything reads the clean pass; else there is none, and losses are NaN.
        ranks: Ranks that share the rows.
        check: Raises if the pass was random.
        view: Whether estimators read what the loss reads of the outputs.
    """
    size, seen = passes.batch.size, list[Any]()
    if not reads:
        dtype = layout.structure.losses.dtype
        return torch.full((size,), torch.nan, dtype=dtype), {}, None
    if ranks.size > 1 and worth_sharing(layout, size, ranks, view):
        shown = seen if view else None
        losses, record = shared_clean_pass(passes, layout, ranks, check, shown)
    else:
        see = (lambda *outputs: seen.extend(outputs)) if view else None
        losses, recorded = passes.clean(layout.needed, layout.embedding, see=see)
        check()
        losses, record = ranks.broadcast(losses), dict(recorded)
    check_finite(losses, "the clean pass")
    return losses, record, loss_view(passes.batch, *seen) if seen else None


Run = Callable[[Query], RowResults]
"""Evaluates a query."""


def run_query(query: Query) -> RowResults:
    """Run a query on the model."""
    return query.step.runner.run(query.step.group.name, query.perturbation, query.rows)


def run_queries(steps: Sequence[GroupStep], session: Session, run: Run = run_query) -> None:
    """Phase 1: run all queries of the groups."""
    several = session.replicas.several
    loop = QueryLoop(steps, len(session.losses), session.chunk, session.ranks, several)
    while (query := loop.next()) is not None:
        loop.tell(query, run(query))


class Staged:
    """Keeps all gradients of a step until `commit` writes them: an error before changes nothing."""

    streaming = seeded = False

    def __init__(self) -> None:
        self._staged: Gradients = {}
        self._own: set[nn.Parameter] = set()  # staged without other references

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's complete gradient of a parameter."""
        add_gradients(self._staged, {parameter: gradient})

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's complete gradient as keys and scalars; returns its squared norm."""
        total = 0.0
        for parameter, gradient, energy in draws.gradients():
            total += energy
            self.take(parameter, gradient)
            self._own.add(parameter)
        return total

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nobody waits for them."""

    def passed(self, group: str, time: int | None) -> None:
        """Nobody waits for it."""

    def commit(self) -> None:
        """Write all gradients."""
        while self._staged:  # one by one, so that only one gradient exists twice at a time
            parameter, gradient = self._staged.popitem()
            accumulate(parameter, gradient, own=parameter in self._own)


def writer_of(steps: Sequence[GroupStep], session: Session, update: Update | None = None) -> Writer:
    """Writer of these groups' gradients, to ``.grad`` or to an update."""
    named = {step.group.name: step.group.parameters for step in steps}
    if update is None and not any(getattr(p, HOOKS, None) for ps in named.values() for p in ps):
        return Staged()
    bindings = zip(steps, session.layout.bindings, strict=True)
    spans = {step.group.name: binding.local_span for step, binding in bindings}
    return Streaming(named, spans, session.layout.structure, update)


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


def report_of(
    steps: Sequence[GroupStep], session: Session, started: float, exact: bool
) -> StepReport:
    """Report of a step of all ranks.

    Args:
        steps: The groups, after both phases.
        session: The batch.
        started: Time at which the step began.
        exact: Whether cosines to the exact gradient are known.
    """
    named, replicas = {step.group.name: step for step in steps}, session.replicas
    loss = replicas.share * _mean_loss(session, [step.loss for step in steps])
    own = torch.tensor([loss, session.clean, session.probe], dtype=torch.float64)
    loss, clean, probe = replicas.sum([own])[0].tolist()
    cost = session.cost
    return StepReport(
        loss=loss,
        queries=cost.rows,
        forward_equivalents=ForwardEquivalents(clean, cost.queries, cost.local, probe),
        counts={name: step.counts for name, step in named.items()},
        dropped={name: step.dropped for name, step in named.items()},
        snr={name: step.snr for name, step in named.items()},
        seconds=time.perf_counter() - started,
        shaping={name: s.shaping for name, s in named.items() if s.shaping is not None},
        cosine={name: step.cosine for name, step in named.items()} if exact else {},
        points=replicas.total,
    )


def _mean_loss(session: Session, seen: Sequence[float | None]) -> float:
    """Mean loss of the clean pass; without one, of the estimators' queries."""
    if session.clean:
        return float(session.losses.mean())
    found = [loss for loss in seen if loss is not None]
    return sum(found) / len(found)
