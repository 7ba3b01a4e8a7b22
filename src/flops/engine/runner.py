"""Who runs the rows: the model on this machine, with prefix replay, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flops.engine.collectives import Collectives
from flops.engine.rows import plan_rows, spans
from flops.estimators.base import Answer, Perturbation, PointPlan, Rows, Sink
from flops.passes.checks import check_finite
from flops.passes.local_vjp import Gradients, LocalTarget, local_products, recomputed
from flops.passes.replay import Passes, Prefix, Record, nothing
from flops.passes.structure import Call

BACKWARD = 3.0  # forward equivalents of backpropagation, per point


@dataclass
class Cost:
    """Running totals: rows of queries, and forward equivalents of queries and local products."""

    rows: int = 0
    queries: float = 0.0
    local: float = 0.0

    def add(self, other: Cost) -> None:
        """Charge what stands in another one."""
        self.rows += other.rows
        self.queries += other.queries
        self.local += other.local


@dataclass(frozen=True)
class LocalRunner:
    """Runs rows and local products of a group; see `flops.estimators.base.Runner`.

    Attributes:
        passes: Passes over the batch.
        record: Clean outputs that are replayed.
        size: Points of the batch.
        chunk: Most rows in one pass.
        ranks: Ranks that share the rows.
        cost: Charged with everything that runs.
    """

    passes: Passes
    record: Record
    size: int
    chunk: int
    ranks: Collectives
    cost: Cost

    def run(self, name: str, perturbation: Perturbation, rows: Rows) -> Answer:
        """Perturbed losses of a chunk of rows.

        Raises:
            NonFiniteLossError: If one is NaN or infinite; with several ranks they find out
                together.
        """
        fast = torch.inference_mode() if perturbation.edits else nullcontext()
        with fast:
            losses = self.passes.run(
                perturbation.prefix,
                self.record,
                rows.points,
                edits=perturbation.edits,
                around=perturbation.around,
            )
        losses = losses.clone() if losses.is_inference() else losses
        if self.world_size == 1:
            check_finite(losses, f"a query of group '{name}'", rows.points)
        return Answer(losses)

    @property
    def world_size(self) -> int:
        """Ranks that share the rows."""
        return self.ranks.size

    def share(self, count: int) -> tuple[int, int]:
        """First and last + 1 of so many things that are this rank's."""
        return self.ranks.shard(count)

    def own_points(self, plan: PointPlan) -> tuple[int, int]:
        """First and last + 1 of the points whose rows run here, with those that have none."""
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
        """Largest value over the ranks, entry by entry."""
        return self.ranks.all_max(tensor)

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sum over the ranks of gradients that some of them may lack."""
        return self.ranks.sum_gradients(found, parameters)

    def products(
        self,
        prefix: Prefix,
        targets: Sequence[LocalTarget],
        deltas: Mapping[int, Mapping[int, Tensor]],
        sink: Sink,
        points: tuple[int, int] | None = None,
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> None:
        """Sum of the local products of some points; charged for all."""
        calls = self.passes.structure.calls
        low, high = points or (0, self.size)
        remaining = _uses(targets)
        parts = spans(high - low, self.chunk)
        for number, (a, b) in enumerate(parts):
            begin, end = low + a, low + b
            at = torch.arange(begin, end)
            part = {
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
                if last and remaining[parameter] == target.last:  # a tied one has several targets
                    sink.complete([parameter], after=calls[target.last].end)

            local_products(
                self.passes,
                prefix,
                self.record,
                at,
                targets,
                part,
                partial(take, last=number == len(parts) - 1),
                watch=None if watch is None else partial(watch, at),
            )
        self.cost.local += self.size * self.local_share(prefix, targets)

    def local_share(self, prefix: Prefix, targets: Sequence[LocalTarget]) -> float:
        """From the prefix to the last target, and twice through the targets for their products."""
        structure = self.passes.structure
        last = max(structure.calls[t.last].end for t in targets)
        forward = structure.share(_between(self.passes, 0, last)) - prefix.share
        parts = [(structure.calls[t.first].start, structure.calls[t.last].end) for t in targets]
        rows = min(self.size, self.chunk)
        again = [structure.calls[c] for t in targets for c in recomputed(structure, t, rows)]
        products = 2 * sum(structure.share(_between(self.passes, a, b)) for a, b in parts)
        return forward + structure.share(again) + products

    def backpropagate(
        self, parameters: Sequence[nn.Parameter]
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """Exact gradients of this rank's part of the mean loss, and the losses."""
        begin, end = self.share(self.size)
        gradients: tuple[Tensor | None, ...] = (None,) * len(parameters)
        losses = torch.empty(0)
        with torch.enable_grad():
            if end > begin:
                points = torch.arange(begin, end)
                losses = self.passes.run(nothing(self.passes.structure), {}, points)
                if self.world_size == 1:
                    check_finite(losses.detach(), "the forward pass")
                if losses.requires_grad:
                    alone = self.world_size == 1
                    mean = losses.mean() if alone else losses.sum() / self.size
                    gradients = torch.autograd.grad(mean, parameters, allow_unused=True)
        self.cost.local += BACKWARD * self.size
        return gradients, losses


def _uses(targets: Sequence[LocalTarget]) -> dict[nn.Parameter, int]:
    """The last target of each parameter."""
    return {p: target.last for target in targets for p in target.parameters}


def _between(passes: Passes, first: int, last: int) -> list[Call]:
    """Outermost calls inside a span of time."""
    chosen: list[Call] = []
    inside: set[int] = set()
    for call in passes.structure.calls:
        if call.parent in inside:
            inside.add(call.number)
        elif call.start >= first and call.end <= last:
            chosen.append(call)
            inside.add(call.number)
    return chosen
