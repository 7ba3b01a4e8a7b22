"""Rows of queries, and their runner: a local model with prefix replay, in chunks.

A row is (point, draw, sign): draw i of a point under +z, or under -z for the second half of an
antithetic pair. Rows are sorted by point and draw, and split into chunks of nearly equal size;
every rank makes the same plan and runs its share of it (`flops.engine.collectives`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flops.estimators.base import (
    BatchPlan,
    Estimation,
    Perturbation,
    Plan,
    PointPlan,
    RowResults,
    Rows,
    Sink,
)
from flops.passes.batch import check_finite
from flops.passes.local_vjp import Gradients, LocalTarget, local_vjps
from flops.passes.ranks import Ranks, Replicas
from flops.passes.replay import Passes, Record
from flops.perturb.activations import Sites


def plan_rows(counts: Tensor, unit: int) -> Rows:
    """All rows of a group, in order."""
    draws_of = counts // unit
    points = torch.repeat_interleave(torch.arange(len(counts)), draws_of)
    firsts = torch.cumsum(draws_of, 0) - draws_of
    draws = torch.arange(len(points)) - firsts[points]
    weights = 1.0 / draws_of[points].double()
    signs = torch.ones(len(points))
    if unit == 2:  # pairs are adjacent
        points, draws, weights = (x.repeat_interleave(2) for x in (points, draws, weights))
        signs = torch.tensor([1.0, -1.0]).repeat(len(signs))
    return Rows(points, draws, signs, weights)


def part(rows: Rows, begin: int, end: int) -> Rows:
    """A slice of rows."""
    cut = slice(begin, end)
    return Rows(rows.points[cut], rows.draws[cut], rows.signs[cut], rows.weights[cut])


def own_chunks(plan: Plan, size: int, chunk: int, ranks: Ranks) -> Iterator[Rows]:
    """This rank's share of the rows of a plan, in chunks.

    Args:
        plan: Plan of an estimation.
        size: Points of the batch.
        chunk: Largest number of rows of a chunk; pairs are not split.
        ranks: Ranks that share the rows.
    """
    if isinstance(plan, PointPlan):
        rows = plan_rows(plan.counts, plan.unit)
        first, last = ranks.shard(len(rows.points), plan.unit)
        for begin, end in spans(last - first, chunk, plan.unit):
            yield part(rows, first + begin, first + end)
        return
    first, last = _bounds(plan, size, ranks)
    for number in range(first // size, -(-last // size)):
        low, high = max(first - number * size, 0), min(last - number * size, size)
        for begin, end in spans(high - low, chunk):
            points = torch.arange(low + begin, low + end)
            ones = torch.ones(len(points))
            yield Rows(points, torch.full_like(points, number), ones, ones / size)


def gathered(
    plans: Sequence[tuple[Plan, Sequence[Tensor], Estimation]], size: int, ranks: Ranks
) -> list[tuple[Tensor, Tensor]]:
    """Values of all ranks, in the order of each plan, and their points; one message for all.

    Args:
        plans: Each with the values of this rank's chunks, and its estimation.
        size: Points of the batch.
        ranks: Ranks that share the rows.
    """
    mine, points = [], []
    for plan, values, of in plans:
        shape = (0,) if of.width == 1 else (0, of.width)
        own = torch.cat([torch.empty(shape, dtype=of.dtype), *values])
        if isinstance(plan, PointPlan):
            at = plan_rows(plan.counts, plan.unit).points[:: plan.unit]
            begin, _ = ranks.shard(len(at))
        else:
            at = torch.arange(size).repeat(len(plan.prefixes))
            begin, _ = _bounds(plan, size, ranks)
        mine.append((own, begin))
        points.append(at)
    if ranks.size == 1:
        return [(own, at) for (own, _), at in zip(mine, points, strict=True)]
    lengths = [len(at) * of.width for at, (*_, of) in zip(points, plans, strict=True)]
    whole, offset = torch.zeros(sum(lengths), dtype=torch.float64), 0
    for (own, begin), length, (*_, of) in zip(mine, lengths, plans, strict=True):
        first = offset + begin * of.width
        whole[first : first + own.numel()] = own.double().flatten()
        offset += length
    parts = ranks.all_gather(whole, 0, len(whole)).split(lengths)
    found = []
    for part, at, (*_, of) in zip(parts, points, plans, strict=True):
        typed = part.to(of.dtype)
        found.append((typed if of.width == 1 else typed.view(-1, of.width), at))
    return found


def _bounds(plan: BatchPlan, size: int, ranks: Ranks) -> tuple[int, int]:
    """First and last + 1 of this rank's rows of a `BatchPlan`."""
    bounds = ranks.bounds([1 - prefix.share for prefix in plan.prefixes], size)
    return bounds[ranks.rank], bounds[ranks.rank + 1]


def shares(costs: Sequence[float], size: int, ranks: int) -> list[int]:
    """Bounds that distribute rows, ``size`` of each cost in turn, at nearly equal cost.

    Returns:
        ``ranks + 1`` numbers from 0 to the number of rows; rank r has rows bounds[r] to
        bounds[r + 1] - 1.
    """
    most = max(costs, default=1.0)
    ends = list(accumulate(max(c, 1e-3 * most) * size for c in costs))  # a row is never free
    bounds = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        at = bisect_left(ends, wanted)
        before = ends[at - 1] if at else 0.0
        row = at * size + round(size * (wanted - before) / (ends[at] - before))
        bounds.append(max(bounds[-1], row))
    return [*bounds, size * len(costs)]


def spans(count: int, size: int, unit: int = 1) -> list[tuple[int, int]]:
    """Split ``count`` rows into nearly equal spans of at most ``size``, at multiples of the unit.

    One-row kernels round differently, so no span has a single row unless that is the only row; a
    span of size two may therefore have three.
    """
    if count == 0:
        return []
    pieces = -(-count // max(unit, size - size % unit))
    pieces = min(pieces, max(1, count // 2))
    return list(pairwise(unit * (count // unit * i // pieces) for i in range(pieces + 1)))


class ForwardEquivalents(float):
    """Cost in forward passes of one point, with its parts.

    Attributes:
        clean: The noise-free pass, one per point.
        queries: Rows of the queries, each weighted by the part of the model that ran.
        local: Local VJPs: forward through the targets, and twice that for the backward pass.
        probe: Rows that trace a new kind of input.
    """

    clean: float
    queries: float
    local: float
    probe: float

    def __new__(
        cls, clean: float = 0.0, queries: float = 0.0, local: float = 0.0, probe: float = 0.0
    ) -> ForwardEquivalents:
        """Sum the parts and keep them."""
        self = super().__new__(cls, clean + queries + local + probe)
        self.clean, self.queries, self.local, self.probe = clean, queries, local, probe
        return self

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {
            "clean": self.clean,
            "queries": self.queries,
            "local": self.local,
            "probe": self.probe,
        }


@dataclass
class Cost:
    """Running totals: rows of queries, and forward equivalents of queries and local VJPs."""

    rows: int = 0
    queries: float = 0.0
    local: float = 0.0

    def add(self, other: Cost) -> None:
        """Add another cost."""
        self.rows += other.rows
        self.queries += other.queries
        self.local += other.local


@dataclass(frozen=True)
class LocalRunner:
    """Runs rows and local VJPs of a group; see `flops.estimators.base.Runner`.

    Attributes:
        passes: Passes over the batch.
        record: Clean outputs that are replayed.
        size: Points of the batch.
        chunk: Largest number of rows in one pass.
        cost: Charged for all passes.
        ranks: Ranks that share the rows.
        replicas: Ranks with other points of the same step; None for none.
    """

    passes: Passes
    record: Record
    size: int
    chunk: int
    cost: Cost
    ranks: Ranks = field(default_factory=Ranks)
    replicas: Replicas = field(default_factory=lambda: Replicas(0))

    def __post_init__(self) -> None:
        """Without others, all points of the step are here."""
        if not self.replicas.total:
            object.__setattr__(self, "replicas", Replicas(self.size))

    def run(self, name: str, perturbation: Perturbation, rows: Rows) -> RowResults:
        """Perturbed losses of a chunk of rows.

        Raises:
            NonFiniteLossError: If one is NaN or infinite; several ranks check when they
                synchronise.
        """
        fast = torch.inference_mode() if perturbation.edits else nullcontext()
        run = partial(
            self.passes.run,
            perturbation.prefix,
            self.record,
            rows.points,
            edits=perturbation.edits,
            around=perturbation.around,
        )
        with fast:
            evaluate = perturbation.evaluate or (lambda run: RowResults(run()))
            results = evaluate(run)
        if results.losses.is_inference():
            results = replace(results, losses=results.losses.clone())
        if self.world_size == 1:
            check_finite(results.losses, f"a query of group '{name}'", rows.points)
        return results

    @property
    def world_size(self) -> int:
        """Ranks that share the rows."""
        return self.ranks.size

    @property
    def fitters(self) -> Replicas | None:
        """Ranks that share the rows, each with its share of the points; None for none.

        Not on a mesh, nor for fewer points than ranks.
        """
        if self.world_size == 1 or self.replicas.several or self.size < self.world_size:
            return None
        return self.ranks.fitters(self.size)

    def share(self, count: int) -> tuple[int, int]:
        """First and last + 1 of this rank's share of ``count`` items."""
        return self.ranks.shard(count)

    def own_points(self, plan: PointPlan) -> tuple[int, int]:
        """First and last + 1 of this rank's points, including those without rows."""
        if self.world_size == 1:
            return 0, self.size
        points = plan_rows(plan.counts, plan.unit).points
        begin, end = self.ranks.shard(len(points), plan.unit)
        if begin == end:
            return 0, 0
        low = int(points[begin]) if begin else 0
        last = int(points[end - 1]) + 1
        return low, max(last, int(points[end])) if end < len(points) else self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""
        return self.ranks.all_sum(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        return self.ranks.all_max(tensor)

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sum of gradients over the ranks, some of which may have none."""
        return self.ranks.sum_gradients(found, parameters)

    def charge(self, cost: float) -> None:
        """Charge forward equivalents of work that is neither a query nor a local VJP."""
        self.cost.local += cost

    def local_vjps(
        self,
        sites: Sites,
        deltas: Mapping[int, Mapping[int, Tensor]],
        sink: Sink,
        points: tuple[int, int] | None = None,
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> None:
        """Sum of the local VJPs of some points; charged for all."""
        calls, targets = self.passes.structure.calls, sites.local
        low, high = points or (0, self.size)
        last_use = {p: target.last for target in targets for p in target.parameters}
        cuts = spans(high - low, self.chunk)
        for number, (a, b) in enumerate(cuts):
            begin, end = low + a, low + b
            at = torch.arange(begin, end)
            cut = {
                call: {
                    i: delta[begin:end].movedim(0, calls[call].leaves[i].axis or 0)
                    for i, delta in by_leaf.items()
                }
                for call, by_leaf in deltas.items()
            }

            def take(
                target: LocalTarget, parameter: nn.Parameter, gradient: Tensor, last: bool
            ) -> None:
                sink.add(parameter, gradient)
                if last and last_use[parameter] == target.last:  # a tied one has several targets
                    sink.complete([parameter], after=calls[target.last].end)

            local_vjps(
                self.passes,
                sites.local_prefix,
                self.record,
                at,
                targets,
                cut,
                partial(take, last=number == len(cuts) - 1),
                watch=None if watch is None else partial(watch, at),
            )
        self.cost.local += self.size * self.local_share(sites)

    def local_share(self, sites: Sites) -> float:
        """Cost of the local VJPs of a point, in forward passes."""
        return sites.local_share(min(self.size, self.chunk))
