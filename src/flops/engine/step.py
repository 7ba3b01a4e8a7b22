"""One step: ask everything at the same parameters, then write the gradients.

Phase 1: clean pass, allocation, and the queries of all groups. Every group asks for rows; who can
run them does, and tells their losses; ranks meet when all groups have asked. Nothing changes.
Phase 2: gradients, group by group and parameter by parameter (`flops.engine.gradients`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Signal
from flops.allocators.budgets import note_demand
from flops.engine.allocation import (
    PILOT,
    counts_of,
    learn,
    pilot_counts,
    pilot_share,
)
from flops.engine.collectives import Collectives
from flops.engine.gradients import Collector, GroupSink, Update, Writer
from flops.engine.groups import ResolvedGroup
from flops.engine.layout import Layout, Layouts
from flops.engine.rows import gathered, own_chunks
from flops.engine.runner import Cost, LocalRunner
from flops.estimators.base import (
    Answer,
    Estimate,
    Estimation,
    Perturbation,
    Plan,
    Queries,
    Rows,
    Runner,
)
from flops.estimators.variance import Collected, traces_of, variance
from flops.passes.batch import Batch
from flops.passes.checks import (
    RandomState,
    check_deterministic,
    check_finite,
    no_autocast_cache,
    slow_attention_path,
)
from flops.passes.local_vjp import Gradients
from flops.passes.replay import Passes
from flops.subspace.report import ShapingReport


@dataclass
class Session:
    """A batch after its clean pass, from which every query starts.

    Attributes:
        layout: Structure of the forward pass and the estimators' bindings.
        passes: Passes over this batch.
        record: Clean outputs that are replayed.
        losses: Clean losses, shape (B,); NaN if the clean pass was left out.
        probe: Passes of a row that it took to find the layout.
        chunk: Most rows in one pass.
        clean: Forward equivalents of the clean pass.
        ranks: Ranks that share the rows.
        index: Positions of the points in the data set, if given.
        cost: What all queries of the session cost.
    """

    layout: Layout
    passes: Passes
    record: dict[int, list[Any]]
    losses: Tensor
    probe: float
    chunk: int
    clean: float
    ranks: Collectives
    index: Tensor | None = None
    cost: Cost = field(default_factory=Cost)

    def queries(
        self, group: str, key: tuple[int, ...], memory: dict[str, Any], counts: Tensor | None = None
    ) -> Queries:
        """Queries of one group; counts are filled in when they are known."""
        size = len(self.losses)
        ids = torch.arange(size) if self.index is None else self.index
        none = torch.zeros(size, dtype=torch.long)
        return Queries(
            group,
            self.losses,
            none if counts is None else counts,
            key,
            ids.tolist(),
            memory,
            frozenset(self.record),
        )

    def runner(self, cost: Cost) -> LocalRunner:
        """Runs rows of this batch."""
        size = len(self.losses)
        return LocalRunner(self.passes, self.record, size, self.chunk, self.ranks, cost)


@contextmanager
def opened(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    layouts: Layouts,
    batch: Batch,
    reads: Callable[[Layout], bool] | None,
    chunk: int | None,
    ranks: Collectives,
) -> Iterator[Session]:
    """Look at the batch, make its clean pass, and restore the random state in the end.

    Args:
        model: The model.
        modules: Its modules by name.
        layouts: What is known about it.
        batch: The points.
        reads: Whether anything reads the clean pass; None makes it in any case.
        chunk: Most rows in one pass; None for as many as need little memory.
        ranks: Ranks that share the rows.
    """
    state = RandomState()
    try:
        with slow_attention_path(), no_autocast_cache():
            layout, probe = layouts.find(batch, state)
            passes = Passes(model, modules, layout.structure, batch)
            most = chunk or layout.chunk(batch.size)
            with torch.no_grad():
                record: Mapping[int, list[Any]] = {}
                losses, clean = torch.full((batch.size,), torch.nan), 0.0
                losses = losses.to(layout.structure.losses.dtype)
                if reads is None or reads(layout):
                    losses, record = passes.clean(layout.needed, layout.embedding)
                    clean = float(batch.size)
                    check_deterministic(state, modules)
                    losses = ranks.broadcast(losses)
                    check_finite(losses, "the clean pass")
                yield Session(layout, passes, dict(record), losses, probe, most, clean, ranks)
            check_deterministic(state, modules)
    finally:
        state.restore()


class GroupStep:
    """One group in one step: pilot, allocation, queries; then its gradient.

    Counts must not depend on the noise they weight. Without a pilot the queries of a step teach
    the allocator for the next one. With a pilot of q queries per point (charged to the budget) it
    learns on this very batch, and the two estimates are combined with weights fixed in advance,

        g = a g_pilot + (1 - a) g_later,   a = q / (q + mean later count),

    never pooled by 1/A_j, which would bias the gradient.

    Attributes:
        counts: Queries of each point, the pilot included, shape (B,).
        dropped: Points without any query.
        noise: Trace of the covariance of the gradient; 0 if there is no sampling noise.
        snr: Squared length of the gradient over that, the noise taken off.
        shaping: What shaped noise knows, if there is any.
        loss: Mean loss, of an estimator that reads no clean pass.
        cosine: To the exact gradient, where that is known.
        estimate: Derivatives of the last queries.
    """

    dropped: int = 0
    noise: float = 0.0
    snr: float = float("inf")
    shaping: ShapingReport | None = None
    loss: float | None = None
    cosine: float = float("nan")
    estimate: Estimate

    def __init__(
        self,
        group: ResolvedGroup,
        binding: Any,
        allocator: Allocator,
        signal: Signal,
        queries: Queries,
        runner: Callable[[Cost], Runner],
        ranks: Collectives,
    ) -> None:
        self.group, self._binding, self.allocator = group, binding, allocator
        self._signal, self._queries, self._ranks = signal, queries, ranks
        self.cost = Cost()
        self.runner = runner(self.cost)
        self.counts = queries.counts
        self._early: tuple[Gradients, Estimate, float] | None = None
        self.estimation = self._first()

    def _first(self) -> Estimation:
        estimator = self.group.estimator
        self._pilot = 0
        if estimator.minimum_queries == 0:  # it makes none
            return self._begin(self._queries)
        self._pilot = self.allocator.pilot
        if not self._pilot:
            self.counts = self._decided(counts_of(self.group, self.allocator, self._signal))
            self.dropped = int((self.counts == 0).sum())
            return self._begin(replace(self._queries, counts=self.counts))
        first = pilot_counts(self.group, self._pilot, self._signal)
        self.counts = first
        return self._begin(replace(self._queries, counts=first, key=(*self._queries.key, PILOT)))

    def _decided(self, counts: Tensor) -> Tensor:
        """Counts that all ranks share, and that a resumed step keeps."""
        counts, decide = self._ranks.broadcast(counts), self._queries.decide
        return counts if decide is None else decide("counts", counts)

    def _begin(self, queries: Queries) -> Estimation:
        estimation = self.group.estimator.begin(self._binding, queries, self.runner)
        estimation.prepare(self.runner)
        return estimation

    def plan(self) -> Plan | None:
        """The rows that are wanted next; None if there are none."""
        plan = self.estimation.plan()
        if plan is None and self._pilot:
            self._allocate_later()
            plan = self.estimation.plan()
        return plan

    def _allocate_later(self) -> None:
        """Learn from the pilot, which gives its gradient now: it is a part of the traces."""
        found = Collected()
        self.estimation.write(found, self.runner)
        gradients = found.gradients
        if self.estimation.partial:
            gradients = self.runner.sum_gradients(gradients, self.group.parameters)
        early = self.estimation.finish()
        first, self._pilot = self.counts, 0
        rest = replace(self._signal, budget=self._signal.budget - int(first.sum()))
        learn(self.allocator, rest, early)
        later = self._decided(counts_of(self.group, self.allocator, rest))
        self._early = (gradients, early, pilot_share(first, later))
        self.counts = first + later
        self.estimation = self._begin(replace(self._queries, counts=later))

    def write(
        self, writer: Writer | Collector, exact: Gradients | None = None, scale: float = 1.0
    ) -> None:
        """Hand over the gradient times a scale, and let the allocator learn."""
        size, several = self._queries.size, self._ranks.size > 1
        parameters = self.group.parameters
        hold = self._early is not None or (several and self.estimation.partial)
        sink = GroupSink(writer, self.group.name, parameters, hold, exact)
        share = 0.0 if self._early is None else self._early[2]
        self.estimation.write(sink, self.runner, (1 - share) * scale)
        if several and self.estimation.partial:
            sink.sums = self.runner.sum_gradients(sink.sums, parameters)
        last = estimate = self.estimation.finish()
        self.estimate = last
        self.noise = (1 - share) ** 2 * variance(last, size)
        if self._early is not None:
            gradients, estimate, _ = self._early
            for parameter, gradient in gradients.items():
                sink.add(parameter, gradient * (share * scale))
            self.noise += share**2 * variance(estimate, size)
        else:
            learn(self.allocator, self._signal, estimate)
        sink.close()
        norm = sink.energy / scale**2
        if self.noise > 0:
            self.snr = max(0.0, norm - self.noise) / self.noise
        self.shaping = last.shaped.report if last.shaped is not None else None
        self.loss, self.cosine = estimate.loss, sink.cosine
        if self.allocator.across_groups and estimate.points is not None:
            cost = self.cost.queries / max(self.cost.rows, 1)
            note_demand(self._queries.memory, traces_of(estimate, size), norm, cost)


@dataclass(frozen=True)
class Query:
    """A chunk of rows of one group that somebody has to run."""

    step: GroupStep
    rows: Rows
    perturbation: Perturbation


class QueryLoop:
    """All queries of a step: `next` says what to run, `tell` takes what came back.

    Args:
        steps: The groups.
        size: Points of the batch.
        chunk: Most rows of a query.
        ranks: Ranks that share the rows.
    """

    def __init__(
        self, steps: Sequence[GroupStep], size: int, chunk: int, ranks: Collectives
    ) -> None:
        self._steps, self._size, self._chunk, self._ranks = steps, size, chunk, ranks
        self._queue: deque[tuple[int, Rows]] = deque()
        self._round: dict[int, Plan] = {}
        self._values: dict[int, list[Tensor]] = {}

    def next(self) -> Query | None:
        """What to run next; None when all groups have what they need."""
        while not self._queue:
            if not self._advance():
                return None
        number, rows = self._queue.popleft()
        step = self._steps[number]
        return Query(step, rows, step.estimation.ask(rows))

    def tell(self, query: Query, answer: Answer) -> None:
        """What the rows showed; charged to their group."""
        step, count = query.step, len(query.rows)
        step.cost.rows += count
        step.cost.queries += count * (1 - query.perturbation.prefix.share)
        values = step.estimation.tell(query.rows, answer)
        self._values[self._steps.index(step)].append(values)

    def _advance(self) -> bool:
        """Meet the other ranks, and find out what is wanted next."""
        if self._round:
            self._meet()
        self._round = {}
        for number, step in enumerate(self._steps):
            plan = step.plan()
            if plan is not None:
                self._round[number] = plan
                if self._ranks.alone:  # nobody waits: one group's noise at a time
                    break
        self._values = {number: [] for number in self._round}
        for number, plan in self._round.items():
            chunks = own_chunks(plan, self._size, self._chunk, self._ranks)
            self._queue.extend((number, rows) for rows in chunks)
        if not self._round and not self._ranks.alone:
            self._settle()
        return bool(self._round)

    def _meet(self) -> None:
        found = gathered(
            [(p, self._values[n], self._steps[n].estimation.dtype) for n, p in self._round.items()],
            self._size,
            self._ranks,
        )
        for number, (values, points) in zip(self._round, found, strict=True):
            step = self._steps[number]
            if not self._ranks.alone:  # all ranks refuse them alike
                check_finite(values, f"queries of group '{step.group.name}'", points)
            step.estimation.collect(values, points, step.runner)

    def _settle(self) -> None:
        """Charge what the other ranks ran."""
        costs = [value for s in self._steps for value in (float(s.cost.rows), s.cost.queries)]
        found = iter(self._ranks.sum_scalars(costs))
        for step in self._steps:
            step.cost.rows, step.cost.queries = round(next(found)), next(found)


Run = Callable[[Query], Answer]
"""Runs a query."""


def run_query(query: Query) -> Answer:
    """Run a query on the model."""
    runner = query.step.runner
    assert isinstance(runner, LocalRunner)
    return runner.run(query.step.group.name, query.perturbation, query.rows)


def run_queries(steps: Sequence[GroupStep], session: Session, run: Run = run_query) -> None:
    """Phase 1: run everything that the groups ask for."""
    loop = QueryLoop(steps, len(session.losses), session.chunk, session.ranks)
    while (query := loop.next()) is not None:
        loop.tell(query, run(query))


def writer_of(steps: Sequence[GroupStep], session: Session, update: Update | None = None) -> Writer:
    """What the gradients of these groups go to: ``.grad``, or an update."""
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

    A group's local pass runs nothing behind its own targets, so that a parameter that has been
    stepped by a hook is not read again.
    """
    for number, step in reversed(list(enumerate(steps))):
        # What no product replays any more is forgotten.
        later = [binding.local_needed for binding in session.layout.bindings[: number + 1]]
        for call in session.record.keys() - frozenset().union(*later):
            del session.record[call]
        step.write(writer, exact, scale)
        session.cost.add(step.cost)


@dataclass(frozen=True)
class Spent:
    """A group's gradient that goes nowhere, and the step behind it."""

    gradients: Gradients
    step: GroupStep


def spend(
    session: Session,
    group: ResolvedGroup,
    binding: Any,
    allocator: Allocator,
    signal: Signal,
    queries: Queries,
    run: Run = run_query,
) -> Spent:
    """Both phases of one group, into a dict instead of ``.grad``; for diagnostics and studies."""
    step = GroupStep(group, binding, allocator, signal, queries, session.runner, session.ranks)
    run_queries([step], session, run)
    found = Collector()
    step.write(found)
    session.cost.add(step.cost)
    return Spent(found.gradients, step)
