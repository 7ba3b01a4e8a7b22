"""One group in one step: allocation and pilot, then its gradient and what the step has shown.

What later steps use of a step is kept in the group's memory: the ratio of signal to noise, and the
outlook for automatic numbers of queries (`flops.allocators.progress`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from flops.allocators.base import Allocator, Signal
from flops.allocators.budgets import note_demand
from flops.allocators.progress import isotropic_cosines, note_outlook
from flops.engine.allocation import counts_of, learn
from flops.engine.gradients import Collector, Discard, GroupSink, Writer
from flops.engine.groups import ResolvedGroup
from flops.engine.pilot import Pilot
from flops.engine.rows import Cost, LocalRunner
from flops.estimators.base import Estimate, Estimation, Plan, Queries, Runner, Sink
from flops.estimators.variance import traces_of, variance
from flops.passes.local_vjp import Gradients
from flops.subspace.report import ShapingReport

KEEP = 0.8  # decay of running averages
SIGNAL = 0.01  # least share of signal in an estimate that is all noise


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


def note_signal(memory: dict[str, Any], norm: float, noise: float) -> None:
    """Update the running ratio of a group's squared gradient norm to its noise."""
    if not (math.isfinite(norm) and 0 < noise < math.inf):
        return
    old = memory.get("signal_sums", (norm, noise))
    sums = tuple(KEEP * a + (1 - KEEP) * b for a, b in zip(old, (norm, noise), strict=True))
    memory["signal_sums"], memory["signal"] = sums, sums[0] / sums[1]
