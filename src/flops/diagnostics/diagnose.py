"""Diagnostics of the gradient estimates of a model on a batch.

For every group and allocator: cosine to the exact gradient, J relative to the optimal allocation,
signal-to-noise ratio and cost; and a sweep over sigma (`flops.diagnostics.sigma`).
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flops.allocators import Bernoulli, Equal, Gaussian, Neyman
from flops.allocators.base import Allocator, Learner
from flops.allocators.counts import integer_optimum, objective
from flops.diagnostics.sigma import SigmaRow, sweep
from flops.diagnostics.spend import Spent, spend
from flops.diagnostics.traces import spend_counts
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group, ResolvedGroup
from flops.engine.step import Session
from flops.estimators.base import Queries
from flops.estimators.exact import cosine, exact_gradients
from flops.estimators.variance import traces_of
from flops.passes.batch import LossFunction
from flops.passes.local_vjp import Gradients

SIGMAS = tuple(10.0**e for e in range(-6, 1))
LEARN_STEPS = 30


@dataclass(frozen=True)
class AllocatorRow:
    """One group under one allocator.

    Attributes:
        cosine: Mean cosine to the exact gradient over repeats; NaN without an exact gradient.
        cosine_spread: Its standard deviation over repeats.
        over_optimal: J over J of the optimal integer counts with the same floor.
        equal_over: J of equal counts over J, the factor of variance reduction.
        snr: Mean signal-to-noise ratio.
        forward_equivalents: Cost of an estimate, without the clean pass.
        seconds: Median time of an estimate.
    """

    group: str
    allocator: str
    cosine: float
    cosine_spread: float
    over_optimal: float
    equal_over: float
    snr: float
    forward_equivalents: float
    seconds: float


@dataclass(frozen=True)
class ShapingRow:
    """Shaped noise at one site of a group.

    Attributes:
        k: Mean number of measured directions per point.
        explained_variance: Fraction of the gradient's variance in these directions, held out.
        explore: Share of isotropic queries of the group.
        cosine: Mean cosine of the group's gradient to the exact one.
    """

    group: str
    site: str
    k: float
    explained_variance: float
    explore: float
    cosine: float


@dataclass(frozen=True)
class Diagnosis:
    """All rows of a diagnosis; `to_dict` for JSON."""

    loss: float
    allocators: list[AllocatorRow]
    sigmas: list[SigmaRow]
    shaping: list[ShapingRow] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The tables of `flops diagnose`."""
        from flops.diagnostics.table import text  # a table knows what it shows

        return text(self)

    def recommended(self, group: str) -> float | None:
        """The recommended sigma of a group; None if its estimator has none."""
        found = [row.sigma for row in self.sigmas if row.group == group and row.recommended]
        return found[0] if found else None


def diagnose(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any = None,
    *,
    groups: Group | Sequence[Group] | None = None,
    allocators: Mapping[str, Allocator] | None = None,
    repeats: int = 8,
    trace_queries: int = 100,
    sigmas: Sequence[float] = SIGMAS,
    seed: int = 0,
    chunk: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Measure estimates on one batch; parameters and ``.grad`` are left unchanged.

    Args:
        model: The model.
        loss_fn: One loss per point.
        inputs: Inputs of the batch.
        targets: Targets of the batch.
        groups: As for `ForwardGradient`; None for automatic ones.
        allocators: By name; by default Equal, Bernoulli, Gaussian and Neyman. Learned ones are
            trained on traces of this batch until they have converged.
        repeats: Estimates per group and allocator.
        trace_queries: Queries per point that measure the traces for J.
        sigmas: Values of the sweep; empty for no sweep.
        seed: Seed of the noise.
        chunk: Largest number of rows per pass.
        state: ``state_dict()`` of an engine with the same groups in training, whose shaped noise
            is diagnosed. Without it, shaped noise is first trained on this same batch, which
            gives better results than on new batches.

    Returns:
        Rows by group and allocator, by group and sigma, and by site with shaped noise.
    """
    chosen = allocators or {
        "equal": Equal(),
        "bernoulli": Bernoulli(),
        "gaussian": Gaussian(),
        "neyman": Neyman(),
    }
    # The engine only opens a session; its Gaussian allocator makes it compute embeddings.
    fg = ForwardGradient(model, loss_fn, groups, seed=seed, chunk=chunk)
    fg.embed_points()
    allocator_rows: list[AllocatorRow] = []
    sigma_rows: list[SigmaRow] = []
    shaping_rows: list[ShapingRow] = []
    if state is not None:
        fg.load_state_dict(state)
    with fg.session(inputs, targets) as session:
        exact = exact_gradients(fg.model, session.passes.batch)
        for number, group in enumerate(fg.groups):
            if not group.estimator.makes_queries:
                continue
            bench = _Bench(fg, session, number, group, exact)
            if group.estimator.shaping is not None:
                shaping_rows += bench.shaping(repeats)
            allocator_rows += bench.allocators(chosen, repeats, trace_queries)
            if sigmas and group.estimator.has_sigma:
                sigma_rows += sweep(group, bench.at_counts, session.losses, sigmas, exact)
    return Diagnosis(float(session.losses.mean()), allocator_rows, sigma_rows, shaping_rows)


class _Bench:
    """Measurements of one group on an open session."""

    def __init__(
        self,
        fg: ForwardGradient,
        session: Session,
        number: int,
        group: ResolvedGroup,
        exact: Gradients | None,
    ) -> None:
        self._fg, self._session, self._number, self._group = fg, session, number, group
        # The sweep already shows rounding, so its warning is redundant.
        self._exact = exact
        self._memory: dict[str, Any] = {**fg.memory[group.name], "warned_of_rounding": True}
        self._fixed = False
        self._binding = session.layout.bindings[number]
        self._signal = fg.signal(number, session)

    def at_counts(self, group: ResolvedGroup, counts: Tensor, step: int = 0) -> Spent:
        """Estimate the group, or a variant of it, with given counts."""
        return spend_counts(self._session, group, self._binding, self._queries(step), counts)

    def _queries(self, step: int) -> Queries:
        key = (self._fg.seed, step, self._number)
        memory = dict(self._memory) if self._fixed else self._memory
        return self._session.queries(self._group.name, key, memory)

    def _spend(self, allocator: Allocator, step: int) -> Spent:
        key = (self._fg.seed, step, self._number)
        signal, queries = dataclasses.replace(self._signal, key=key), self._queries(step)
        return spend(self._session, self._group, self._binding, allocator, signal, queries)

    def shaping(self, repeats: int) -> list[ShapingRow]:
        """Train shaped noise unless a state is given; every estimate then starts from it."""
        if "moments" not in self._memory:
            for step in range(LEARN_STEPS):
                self._spend(Equal(), step)
        self._fixed = True
        found = [self._spend(Equal(), 10**5 + step) for step in range(repeats)]
        seen = statistics.mean(cosine(one.gradients, self._exact) for one in found)
        report = found[-1].step.shaping
        assert report is not None
        return [
            ShapingRow(self._group.name, s.site, s.k, s.explained_variance, report.explore, seen)
            for s in report.sites
        ]

    def allocators(
        self, chosen: Mapping[str, Allocator], repeats: int, trace_queries: int
    ) -> list[AllocatorRow]:
        estimator, size = self._group.estimator, len(self._session.losses)
        signal, traces = self._signal, None
        if not estimator.shared:
            counts = torch.full((size,), trace_queries // estimator.unit * estimator.unit)
            reference = self.at_counts(self._group, counts, 10**6)
            traces = traces_of(reference.step.estimate, size)
            values = traces.values.numpy()
            floor = max(1, signal.minimum)
            best = float(
                objective(values, integer_optimum(values, signal.budget, floor).astype(np.float64))
            )
            equal = float(objective(values, np.full(size, signal.budget / size, dtype=np.float64)))
        rows = []
        for name, allocator in chosen.items():
            if estimator.shared and not isinstance(allocator, Equal):
                continue  # shared draws: nothing to allocate
            mine = copy.deepcopy(allocator)
            if traces is not None and isinstance(mine, Learner):
                for step in range(LEARN_STEPS):
                    key = (self._fg.seed, 10**6 + step, self._number)
                    mine.learn(dataclasses.replace(signal, key=key), traces)
            seen, costs, seconds, variances, ratios = [], [], [], [], []
            for step in range(repeats):
                started = time.perf_counter()
                spent = self._spend(copy.copy(mine), step)  # discard what it learns
                seconds.append(time.perf_counter() - started)
                costs.append(spent.step.cost.queries + spent.step.cost.local)
                seen.append(cosine(spent.gradients, self._exact))
                ratios.append(spent.step.snr)
                if traces is not None:
                    variances.append(float(objective(values, spent.step.counts.double().numpy())))
            cost = statistics.mean(variances) if variances else float("nan")
            rows.append(
                AllocatorRow(
                    self._group.name,
                    name,
                    statistics.mean(seen),
                    float(np.std(seen, ddof=1)) if repeats > 1 else 0.0,
                    cost / best if variances else float("nan"),
                    equal / cost if variances else float("nan"),
                    statistics.mean(ratios),
                    statistics.mean(costs),
                    statistics.median(seconds),
                )
            )
        return rows
