"""One group in one step: allocation and pilot, then its gradient and what the step has shown.

What later steps use of a step is kept in the group's memory: the ratio of signal to noise, and the
outlook for automatic numbers of queries (`flops.allocators.progress`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.budgets import demand_of, note_demand
from flops.allocators.fixed import Fixed
from flops.allocators.progress import isotropic_cosines, note_outlook
from flops.engine.gradients import Collector, Discard, Writer
from flops.engine.groups import ResolvedGroup
from flops.engine.joint_learning import learn_jointly
from flops.engine.pilot import Pilot
from flops.engine.rows import Cost, LocalRunner
from flops.errors import QueryError
from flops.estimators.base import Estimate, Estimation, Plan, Queries, Runner, Sink
from flops.estimators.variance import traces_of, variance
from flops.passes.local_vjp import Gradients, add_gradients, inner
from flops.passes.ranks import Replicas
from flops.perturb.draws import Draws
from flops.subspace.report import ShapingReport

KEEP = 0.8  # decay of running averages
SIGNAL = 0.01  # least share of signal in an estimate that is all noise
MANY = 8  # shared draws whose noise takes longer than a message: 1.3 ns and 6.4 ns a value


class Idle(Estimation):
    """A step without queries and without a gradient."""

    joint = True  # nothing to be summed

    def plan(self) -> Plan | None:
        """Nothing to run."""
        return None

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """No gradient."""

    def finish(self) -> Estimate:
        """No statistics."""
        return Estimate()


class GroupSink:
    """Sums a group's gradients until they are complete; see `flops.estimators.base.Sink`.

    Args:
        writer: Writer of the step.
        group: Name of the group.
        parameters: Parameters of the group.
        hold: Whether nothing is complete before `close`, because other ranks, or queries after a
            pilot, add to it.
        exact: The exact gradient, for the cosine.
        share: This rank's share of some draws, first and last + 1; the others add theirs.

    Attributes:
        sums: Partial gradients of parameters that are not complete.
        energy: Squared norm of the complete gradients.
    """

    def __init__(
        self,
        writer: Writer | Discard,
        group: str,
        parameters: Sequence[nn.Parameter],
        hold: bool = False,
        exact: Gradients | None = None,
        share: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._writer, self._group, self._hold, self._exact = writer, group, hold, exact
        self._share = share
        self._open = dict.fromkeys(parameters)
        self.sums: Gradients = {}
        self.energy, self._truth, self._product = 0.0, 0.0, 0.0

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient."""
        add_gradients(self.sums, {parameter: gradient})

    def add_draws(self, draws: Draws) -> None:
        """The complete gradient of the group, as keys and scalars."""
        if self._share is not None:
            draws = draws.part(*self._share(len(draws.weights)))
        if self._hold or self._exact is not None:
            for parameter, gradient, _ in draws.gradients():
                self.add(parameter, gradient)
                self.complete([parameter])
        else:
            self.energy += self._writer.take_draws(self._group, draws)
            self._open.clear()

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Pass complete gradients on; ``after`` is the time that their pass has reached."""
        if self._hold:
            return
        whole = [p for p in parameters if p in self._open]
        for parameter in whole:
            del self._open[parameter]
            if parameter in self.sums:
                gradient = self.sums.pop(parameter)
                self._measure(parameter, gradient)
                self._writer.take(parameter, gradient)
        if after is not None:
            self._writer.passed(self._group, after)
        self._writer.done(whole)

    def close(self) -> None:
        """Pass the remaining gradients on."""
        self._hold = False
        self._writer.passed(self._group, None)
        self.complete(list(self._open))

    @property
    def cosine(self) -> float:
        """Cosine to the exact gradient; NaN if a parameter has none."""
        if self._exact is None or math.isnan(self._truth):
            return math.nan
        scale = (self.energy * self._truth) ** 0.5
        return self._product / scale if scale > 0 else 0.0

    def _measure(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.energy += inner(gradient, gradient)
        if self._exact is not None:
            truth = self._exact.get(parameter)
            self._truth += math.nan if truth is None else inner(truth, truth)
            self._product += 0.0 if truth is None else inner(gradient, truth)


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
        counts: Queries of each point, the pilot's included, shape (B,); of this rank's points.
        dropped: Points without any query, on all ranks; so are the other attributes of all ranks.
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
            learn(self.allocator, pilot.rest, early, self.runner.replicas)
            later = self._allocate(pilot.rest)
            pilot.weigh(later)
            self.counts = pilot.counts + later
            plan = self.estimation.plan()
        return plan

    def write(self, writer: Writer, exact: Gradients | None = None, scale: float = 1.0) -> None:
        """Write the gradient times a scale, and train the allocator."""
        size, pilot, parameters = self._queries.size, self._pilot, self.group.parameters
        replicas, joint = self.runner.replicas, self.estimation.joint
        partial = self.runner.world_size > 1 and self.estimation.partial
        split = self._split(writer)
        shared = partial or split or (replicas.several and not joint)
        own = 1.0 if joint else replicas.share
        withheld = self.estimation.withheld
        target = Discard(writer) if withheld and not isinstance(writer, Collector) else writer
        part = self.runner.share if split else None
        hold = pilot is not None or shared
        sink = GroupSink(target, self.group.name, parameters, hold, exact, part)
        share = 0.0 if pilot is None else pilot.share
        self.estimation.write(sink, self.runner, (1 - share) * scale * own)
        if partial or split:
            sink.sums = self.runner.sum_gradients(sink.sums, parameters)
        if not joint:
            sink.sums = replicas.sum_gradients(sink.sums, parameters)
        self.estimate = first = self.estimation.finish()
        self.noise = (1 - share) ** 2 * variance(self.estimate, size)
        if pilot is not None and pilot.estimate is not None:
            first = pilot.estimate
            for parameter, gradient in pilot.gradients.items():
                sink.add(parameter, gradient * (share * scale))
            self.noise += share**2 * variance(first, size)
        else:
            learn(self.allocator, self._signal, first, replicas)
        sink.close()
        norm = sink.energy / scale**2
        across = self.allocator.across_groups and first.points is not None
        demand = demand_of(traces_of(first, size)) if across else 0.0
        mean, demand = self._join(first, demand, own)
        if self.noise > 0:
            self.snr = max(0.0, norm - self.noise) / self.noise
        if isinstance(self.estimation, Idle):
            self.snr = math.nan
        if self.estimate.shaped is not None:
            report = self.estimate.shaped.report
            self.shaping = replace(report, withheld=self.estimation.withheld)
        self.cosine = sink.cosine
        cost = self.cost.queries / max(self.cost.rows, 1)
        if across:
            note_demand(self._queries.memory, demand, norm, cost)
        memory = self._queries.memory
        if self.shaping is not None:
            memory["withheld"] = memory.get("withheld", 0) + 1 if withheld else 0
            note_signal(memory, norm, self.noise)
        if self.group.automatic and self.dropped < replicas.total:
            self._note_outlook(norm, cost, mean)

    def _split(self, writer: Writer) -> bool:
        """Whether ranks that share the rows sum gradients over parts of many shared draws.

        Of a few draws, everybody generates all: that takes less time than to send a gradient.
        """
        estimator = self.group.estimator
        if self.runner.world_size == 1 or not estimator.seeded or writer.seeded:
            return False
        return int(self.counts[0]) // estimator.unit >= MANY

    def _join(self, first: Estimate, demand: float, own: float) -> tuple[float, float]:
        """Sum noise, costs and counts over the replicas; returns mean counts and the demand.

        Args:
            first: Statistics of the first queries.
            demand: sum_j sqrt(Tr_j) of this rank's points; 0 if groups share no budget.
            own: Weight of this rank's gradient; 1 if it is that of all.
        """
        replicas, cost, joint = self.runner.replicas, self.cost, self.estimation.joint
        loss = math.nan if first.loss is None else first.loss
        mine = [float(self.counts.sum()), demand, self.dropped]
        mine += [cost.rows, cost.queries, cost.local, own**2 * self.noise, own * loss]
        (sums,) = replicas.sum([torch.tensor(mine, dtype=torch.float64)])
        counts, demand, dropped, rows, cost.queries, cost.local, noise, loss = sums.tolist()
        self.dropped, cost.rows = round(dropped), round(rows)
        if not joint:  # else it is that of all already
            self.noise = noise
        self.loss = None if first.loss is None else first.loss if joint else loss
        return counts / replicas.total, demand

    def _note_outlook(self, norm: float, cost: float, queries: float) -> None:
        """What the next step can expect of some queries; nothing while the group is withheld."""
        shaped = self.estimate.shaped
        if shaped is None:  # unbiased: longer than the gradient
            energy = max(norm - self.noise, SIGNAL * self.noise)
            cosines = isotropic_cosines(energy, self.noise, queries)
        elif shaped.left and not self.estimation.withheld:
            cosines = [max(0.0, 1 - error) for error in shaped.left]
            energy = norm / max(cosines[min(round(queries), len(cosines) - 1)], SIGNAL)  # shorter
        else:
            return
        count = sum(p.numel() for p in self.group.parameters)
        local, memory = self.cost.local / self.runner.replicas.total, self._queries.memory
        note_outlook(memory, (count * energy) ** 0.5, cosines, cost, local)


def budget_of(group: ResolvedGroup, size: int, queries: float | None = None) -> int:
    """Queries of a group for ``size`` points, in whole units of the estimator."""
    unit, exact = group.estimator.unit, (group.queries if queries is None else queries) * size
    return int(exact + 1e-9 * exact) // unit * unit  # 1.15 * 100 is 115, not 114.99...


def floor_of(allocator: Allocator, group: ResolvedGroup) -> int:
    """Minimum queries of a point, in whole units of the estimator."""
    unit = group.estimator.unit
    return -(-allocator.min_queries // unit) * unit


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


def learn(
    allocator: Allocator, signal: Signal, estimate: Estimate, replicas: Replicas | None = None
) -> None:
    """Train a learned allocator on this batch; with replicas, on the batch of all of them."""
    if not isinstance(allocator, Learner) or estimate.points is None:
        return
    traces, order = traces_of(estimate, len(signal.losses)), _order(allocator, signal)
    if order is not None:
        signal, traces = signal.at(order), traces.at(order)
    if replicas is None or not replicas.several:
        allocator.learn(signal, traces)
    else:
        learn_jointly(allocator, signal, traces, replicas)


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
