"""One step: queries of all groups at the same parameters, then the gradients.

Phase 1: clean pass, allocation, and the queries of all groups. Every group plans rows, a runner
evaluates them, and ranks synchronise once per round. Nothing is written.
Phase 2: gradients, group by group and parameter by parameter (`flops.engine.gradients`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.budgets import note_demand
from flops.allocators.fixed import Fixed
from flops.allocators.progress import isotropic_cosines, note_outlook
from flops.engine.gradients import Collector, Discard, GroupSink, Update, Writer
from flops.engine.groups import ResolvedGroup
from flops.engine.layout import Layout
from flops.engine.pilot import Pilot
from flops.engine.rows import Cost, LocalRunner, Ranks, gathered, own_chunks
from flops.errors import QueryError
from flops.estimators.base import (
    Estimate,
    Estimation,
    Perturbation,
    Plan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.variance import traces_of, variance
from flops.passes.checks import check_finite
from flops.passes.local_vjp import Gradients
from flops.passes.loss_view import LossView
from flops.passes.replay import Passes
from flops.subspace.report import ShapingReport

KEEP = 0.8  # decay of running averages
SIGNAL = 0.01  # least share of signal in an estimate that is all noise


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
        size = len(self.losses)
        ids = list(range(size)) if self.index is None else self.index.tolist()
        none = torch.zeros(size, dtype=torch.long)
        recorded = frozenset(self.record)
        return Queries(group, size, self.losses, none, key, ids, memory, recorded, view=self.view)

    def runner(self, cost: Cost) -> LocalRunner:
        """A runner of this batch's rows."""
        size = len(self.losses)
        return LocalRunner(self.passes, self.record, size, self.chunk, cost, self.ranks)


def budget_of(group: ResolvedGroup, size: int, queries: float | None = None) -> int:
    """Queries of a group for ``size`` points, in whole units of the estimator."""
    unit, exact = group.estimator.unit, (group.queries if queries is None else queries) * size
    return int(exact + 1e-9 * exact) // unit * unit  # 1.15 * 100 is 115, not 114.99...


def floor_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Minimum queries of a point, in whole units of the estimator."""
    unit = group.estimator.unit
    return -(-allocator.min_queries // unit) * unit


def least_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Minimum queries of a point in a step: its pilot, and the floor after it."""
    unit = group.estimator.unit
    return -(-allocator.pilot // unit) * unit + max(unit, floor_of(allocator, group))


def counts_of(group: ResolvedGroup, allocator: Allocator, signal: Signal) -> Tensor:
    """Counts of an allocator, in the order of the batch.

    Raises:
        QueryError: If the counts are invalid.
    """
    order = _order(allocator, signal)
    counts = allocator.allocate(signal if order is None else signal.at(order))
    integers = isinstance(counts, Tensor) and counts.dtype == torch.long
    if not integers or counts.shape != signal.losses.shape:
        raise QueryError(
            f"group '{signal.group}': the allocator must return a LongTensor of shape "
            f"{tuple(signal.losses.shape)}, not {counts!r}"
        )
    low, total = int(counts.min()), int(counts.sum())
    if low < 0 or total == 0 or bool((counts % signal.unit).any()):
        raise QueryError(
            f"group '{signal.group}': the allocator must return multiples of {signal.unit}, none "
            f"negative and not all 0, not {counts.tolist()[:8]}"
        )
    if group.estimator.shared and len(set(counts.tolist())) > 1:
        raise QueryError(
            f"group '{group.name}': its draws are shared by the batch, so every point "
            "must get the same number of queries; make `queries` a whole number of "
            f"draws ({group.estimator.unit} queries each), or use per-point draws"
        )
    return counts if order is None else torch.empty_like(counts).index_copy_(0, order, counts)


def learn(allocator: Allocator, signal: Signal, estimate: Estimate) -> None:
    """Train a learned allocator on this batch."""
    if isinstance(allocator, Learner) and estimate.points is not None:
        traces, order = traces_of(estimate, len(signal.losses)), _order(allocator, signal)
        if order is not None:
            signal, traces = signal.at(order), traces.at(order)
        allocator.learn(signal, traces)


def _order(allocator: Allocator, signal: Signal) -> Tensor | None:
    """Points sorted by index, so that random choices and ties do not depend on their order."""
    if signal.index is None or isinstance(allocator, Fixed):  # whose counts are by position
        return None
    return torch.argsort(signal.index)


def note_signal(memory: dict[str, Any], norm: float, noise: float) -> None:
    """Update the running ratio of a group's squared gradient norm to its noise."""
    if not (math.isfinite(norm) and 0 < noise < math.inf):
        return
    old = memory.get("signal_sums", (norm, noise))
    sums = tuple(KEEP * a + (1 - KEEP) * b for a, b in zip(old, (norm, noise), strict=True))
    memory["signal_sums"], memory["signal"] = sums, sums[0] / sums[1]


class Idle(Estimation):
    """A step without queries and without a gradient."""

    def plan(self) -> Plan | None:
        """Nothing to run."""
        return None

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """No gradient."""

    def finish(self) -> Estimate:
        """No statistics."""
        return Estimate()


class GroupStep:
    """One group in one step: allocation and queries; then its gradient.

    Args:
        group: The group.
        binding: Binding of its estimator.
        allocator: Allocator of the group, which learns.
        signal: Inputs of the allocator.
        queries: The group's queries, without counts.
        runner: Returns a runner that charges a cost.

    Attributes:
        counts: Queries of each point, the pilot's included, shape (B,).
        dropped: Points without any query.
        noise: Trace of the covariance of the gradient; 0 if there is no sampling noise.
        snr: Squared norm of the gradient, minus the noise, over the noise.
        shaping: State of shaped noise, if any.
        loss: Mean loss, of an estimator without a clean pass.
        cosine: Cosine to the exact gradient, if known.
        estimate: Statistics of the last queries.
        estimation: The group's part of the step, driven by `QueryLoop`.
        cost: Cost of the group in this step.
    """

    dropped: int = 0
    noise: float = 0.0
    snr: float = float("inf")
    shaping: ShapingReport | None = None
    loss: float | None = None
    cosine: float = float("nan")
    estimate: Estimate
    estimation: Estimation

    def __init__(
        self,
        group: ResolvedGroup,
        binding: Any,
        allocator: Allocator,
        signal: Signal,
        queries: Queries,
        runner: Callable[[Cost], LocalRunner],
    ) -> None:
        self.group, self._binding, self.allocator = group, binding, allocator
        self._signal, self._queries = signal, queries
        self.cost = Cost()
        self.runner = runner(self.cost)
        self.counts = queries.counts
        self._pilot: Pilot | None = None
        if not group.estimator.makes_queries:
            self._begin(queries)
        elif not signal.budget:
            self.estimation, self.dropped = Idle(), queries.size
        elif allocator.pilot:
            self._pilot = Pilot(allocator.pilot, signal, queries)
            self.counts = self._pilot.counts
            self._begin(self._pilot.given)
        else:
            self.counts = self._allocate(signal)
            self.dropped = int((self.counts == 0).sum())

    def _begin(self, queries: Queries) -> None:
        self.estimation = self.group.estimator.begin(self._binding, queries, self.runner)

    def _allocate(self, signal: Signal) -> Tensor:
        """Begin with counts that are equal on all ranks and after resuming."""
        counts = self.runner.ranks.broadcast(counts_of(self.group, self.allocator, signal))
        if self._queries.decide is not None:
            counts = self._queries.decide("counts", counts)
        self._begin(replace(self._queries, counts=counts))
        return counts

    def plan(self) -> Plan | None:
        """The next rows to run; None after the last."""
        plan, pilot = self.estimation.plan(), self._pilot
        if plan is None and pilot is not None and pilot.estimate is None:
            early = pilot.finish(self.estimation, self.runner, self.group.parameters)
            learn(self.allocator, pilot.rest, early)
            later = self._allocate(pilot.rest)
            pilot.weigh(later)
            self.counts = pilot.counts + later
            plan = self.estimation.plan()
        return plan

    def write(
        self, writer: Writer | Collector, exact: Gradients | None = None, scale: float = 1.0
    ) -> None:
        """Write the gradient times a scale, and train the allocator."""
        size, pilot, parameters = self._queries.size, self._pilot, self.group.parameters
        shared = self.runner.world_size > 1 and self.estimation.partial
        withheld = self.estimation.withheld
        target = Discard(writer) if withheld and isinstance(writer, Writer) else writer
        sink = GroupSink(target, self.group.name, parameters, pilot is not None or shared, exact)
        share = 0.0 if pilot is None else pilot.share
        self.estimation.write(sink, self.runner, (1 - share) * scale)
        if shared:
            sink.sums = self.runner.sum_gradients(sink.sums, parameters)
        self.estimate = first = self.estimation.finish()
        self.noise = (1 - share) ** 2 * variance(self.estimate, size)
        if pilot is not None and pilot.estimate is not None:
            first = pilot.estimate
            for parameter, gradient in pilot.gradients.items():
                sink.add(parameter, gradient * (share * scale))
            self.noise += share**2 * variance(first, size)
        else:
            learn(self.allocator, self._signal, first)
        sink.close()
        norm = sink.energy / scale**2
        if self.noise > 0:
            self.snr = max(0.0, norm - self.noise) / self.noise
        if isinstance(self.estimation, Idle):
            self.snr = math.nan
        if self.estimate.shaped is not None:
            report = self.estimate.shaped.report
            self.shaping = replace(report, withheld=self.estimation.withheld)
        self.loss, self.cosine = first.loss, sink.cosine
        cost = self.cost.queries / max(self.cost.rows, 1)
        if self.allocator.across_groups and first.points is not None:
            note_demand(self._queries.memory, traces_of(first, size), norm, cost)
        memory = self._queries.memory
        if self.shaping is not None:
            memory["withheld"] = memory.get("withheld", 0) + 1 if withheld else 0
            note_signal(memory, norm, self.noise)
        if self.group.automatic and self.dropped < size:
            self._note_outlook(norm, cost)

    def _note_outlook(self, norm: float, cost: float) -> None:
        """What the next step can expect of some queries; nothing while the group is withheld."""
        shaped, queries = self.estimate.shaped, float(self.counts.double().mean())
        if shaped is None:  # unbiased: longer than the gradient
            energy = max(norm - self.noise, SIGNAL * self.noise)
            cosines = isotropic_cosines(energy, self.noise, queries)
        elif shaped.left and not self.estimation.withheld:
            cosines = [max(0.0, 1 - error) for error in shaped.left]
            energy = norm / max(cosines[min(round(queries), len(cosines) - 1)], SIGNAL)  # shorter
        else:
            return
        count = sum(p.numel() for p in self.group.parameters)
        local, memory = self.cost.local / self._queries.size, self._queries.memory
        note_outlook(memory, (count * energy) ** 0.5, cosines, cost, local)


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
    """

    def __init__(self, steps: Sequence[GroupStep], size: int, chunk: int, ranks: Ranks) -> None:
        self._steps, self._size, self._chunk, self._ranks = steps, size, chunk, ranks
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
        several = self._ranks.size > 1
        if self._round:
            self._synchronise()
        self._round = {}
        for number, step in enumerate(self._steps):
            plan = step.plan()
            if plan is not None:
                self._round[number] = plan
                if not several:  # no other ranks: one group's noise at a time
                    break
        self._values = {number: [] for number in self._round}
        for number, plan in self._round.items():
            chunks = own_chunks(plan, self._size, self._chunk, self._ranks)
            self._queue.extend((number, rows) for rows in chunks)
        if several and not self._round:
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


Run = Callable[[Query], RowResults]
"""Evaluates a query."""


def run_query(query: Query) -> RowResults:
    """Run a query on the model."""
    return query.step.runner.run(query.step.group.name, query.perturbation, query.rows)


def run_queries(steps: Sequence[GroupStep], session: Session, run: Run = run_query) -> None:
    """Phase 1: run all queries of the groups."""
    loop = QueryLoop(steps, len(session.losses), session.chunk, session.ranks)
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
