"""What an estimator sees of one step: the clean pass, its rows, and passes that are charged.

Everything an estimator runs goes through here, so every query is counted and every loss checked.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flops.engine.collectives import Team
from flops.engine.report import ShapingReport
from flops.engine.rows import Rows, chunks, plan, shares, spans
from flops.errors import PrecisionWarning
from flops.passes.checks import check_finite
from flops.passes.intercept import Action
from flops.passes.local_vjp import Gradients, LocalTarget, add_gradients, local_products
from flops.passes.prefix import Prefix
from flops.passes.replay import Edit, Passes, Record
from flops.passes.structure import Call

ROUNDING_UNITS = 50


@dataclass
class Ledger:
    """Running totals of a step."""

    rows: int = 0
    queries: float = 0.0
    local: float = 0.0

    def add(self, other: Ledger) -> None:
        """Charge what stands in another one."""
        self.rows += other.rows
        self.queries += other.queries
        self.local += other.local


@dataclass
class Estimate:
    """What an estimator returns for its group.

    Attributes:
        gradients: Gradient of the mean loss, by parameter.
        slopes: One slope w = (l - b) / sigma per draw, shape (draws,).
        points: The point of each draw; None if the draws are shared by the batch.
        factors: Trace of one draw's covariance over its squared slope: one number, or one for
            each point, shape (B,).
        directions: Number of noise dimensions if a point's draws are mutually orthogonal, else 0.
        shaped: Energies and errors, where the estimate is not an average over the draws.
        loss: Mean loss, of an estimator that reads no clean pass.
    """

    gradients: Gradients
    slopes: Tensor = field(default_factory=lambda: torch.empty(0))
    points: Tensor | None = None
    factors: float | Tensor = 0.0
    directions: int = 0
    shaped: Shaped | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Shaped:
    """What shaped noise says about the error of each point's delta.

    Attributes:
        energy: Estimated squared length of the gradient at the noise, shape (B,).
        error: Estimated squared error of its estimate, shape (B,).
        dimensions: Noise values of a row.
        report: For people.
    """

    energy: Tensor
    error: Tensor
    dimensions: int
    report: ShapingReport


@dataclass(frozen=True)
class Change:
    """A change of the model that all points share: what is replayed, and what calls do instead."""

    prefix: Prefix
    around: Callable[[], Mapping[int, Action]]  # made when it is wanted: there may be thousands


@dataclass(frozen=True)
class Queries:
    """One group's part of one step.

    Attributes:
        name: The group's name.
        losses: Clean losses, shape (B,).
        counts: Queries per point, shape (B,).
        key: (seed, step, group), the key of all noise.
        ids: Identity of each point for its noise.
        memory: What the estimator keeps from step to step for this group; part of the state.
            Replace entries, never write into them: a failed step must leave the old ones.
        team: Processes that share the rows.
    """

    name: str
    passes: Passes
    record: Record
    losses: Tensor
    counts: Tensor
    key: tuple[int, ...]
    ids: list[int]
    chunk: int
    ledger: Ledger
    memory: dict[str, Any]
    team: Team

    @property
    def size(self) -> int:
        """Number of points B."""
        return len(self.losses)

    def chunks(self, unit: int, rank: int | None = None) -> Iterator[Rows]:
        """A process's share of the rows of all queries, this one's by default, cut into chunks."""
        rows = plan(self.counts, unit)
        return chunks(rows.part(*self.team.span(len(rows), unit, rank)), self.chunk, unit)

    def everyone(
        self, mine: Sequence[Tensor], unit: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Slopes of all draws, given those of the chunks that ran here, and their points."""
        points = plan(self.counts, unit).points[::unit]
        begin, _ = self.team.span(len(points))
        slopes = self.team.join(torch.cat([torch.empty(0, dtype=dtype), *mine]), begin, len(points))
        if not self.team.alone:  # all processes refuse them alike
            check_finite(slopes, f"queries of group '{self.name}'", points)
        return slopes, points

    def own(self, unit: int) -> tuple[int, int]:
        """First and last + 1 of the points whose rows run here, with those that have none."""
        points = plan(self.counts, unit).points
        begin, end = self.team.span(len(points), unit)
        if begin == end:
            return 0, 0
        low = int(points[begin]) if begin else 0
        last = int(points[end - 1]) + 1
        return low, max(last, int(points[end])) if end < len(points) else self.size

    def settle(self) -> None:
        """Charge what the other processes ran."""
        rows, cost = self.team.sum([float(self.ledger.rows), self.ledger.queries])
        self.ledger.rows, self.ledger.queries = round(rows), cost

    def run(
        self,
        prefix: Prefix,
        points: Tensor,
        *,
        edits: Mapping[int, Edit] | None = None,
        around: Mapping[int, Action] | None = None,
    ) -> Tensor:
        """Perturbed losses of rows of these points; charged."""
        losses = self.passes.run(prefix, self.record, points, edits=edits, around=around)
        if self.team.alone:
            check_finite(losses, f"a query of group '{self.name}'", points)
        self.ledger.rows += len(points)
        self.ledger.queries += len(points) * (1 - prefix.share)
        return losses

    def means(self, changes: Sequence[Change]) -> Tensor:
        """Mean loss of all points under each change that they share, shape (changes,); charged."""
        costs = [1 - change.prefix.share for change in changes]
        bounds = shares(costs, self.size, self.team.size)
        begin, end = bounds[self.team.rank : self.team.rank + 2]
        found = [torch.empty(0, dtype=self.losses.dtype)]
        for number in range(begin // self.size, -(-end // self.size)):
            change, first = changes[number], number * self.size
            around = change.around()
            low, high = max(begin - first, 0), min(end - first, self.size)
            for a, b in spans(high - low, self.chunk):
                points = torch.arange(low + a, low + b)
                found.append(self.run(change.prefix, points, around=around).cpu())
        losses = self.team.join(torch.cat(found), begin, bounds[-1])
        if not self.team.alone:
            check_finite(losses, f"queries of group '{self.name}'")
        return losses.view(len(changes), self.size).mean(1)

    def products(
        self,
        prefix: Prefix,
        targets: Sequence[LocalTarget],
        deltas: Mapping[int, Mapping[int, Tensor]],
        own: tuple[int, int] | None = None,
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> Gradients:
        """Sum of the local products of some points; charged for all. See `flops.passes.local_vjp`.

        Args:
            prefix: What is replayed.
            targets: In the order in which they end.
            deltas: Of shape (B, ...), with their batch first here.
            own: First and last + 1 of the points; None for all of them.
            watch: Sees points, each target and its arguments.
        """
        total: Gradients = {}
        calls = self.passes.structure.calls
        low, high = own or (0, self.size)
        for a, b in spans(high - low, self.chunk):
            begin, end = low + a, low + b
            points = torch.arange(begin, end)
            part = {
                number: {
                    i: delta[begin:end].movedim(0, calls[number].leaves[i].axis or 0)
                    for i, delta in by_leaf.items()
                }
                for number, by_leaf in deltas.items()
            }
            found = local_products(
                self.passes,
                prefix,
                self.record,
                points,
                targets,
                part,
                watch=None if watch is None else partial(watch, points),
            )
            add_gradients(total, found)
        self.ledger.local += self.size * self.local_share(prefix, targets)
        return total

    def gathered(self, products: Gradients, targets: Sequence[LocalTarget]) -> Gradients:
        """Sum of what all processes found for their points."""
        return self.team.add_gradients(products, [p for t in targets for p in t.parameters])

    def local_share(self, prefix: Prefix, targets: Sequence[LocalTarget]) -> float:
        """From the prefix to the last target once, and twice through the targets for a product."""
        structure = self.passes.structure
        last = max(structure.calls[t.last].end for t in targets)
        forward = structure.share(_between(self.passes, 0, last)) - prefix.share
        parts = [(structure.calls[t.first].start, structure.calls[t.last].end) for t in targets]
        return forward + 2 * sum(structure.share(_between(self.passes, a, b)) for a, b in parts)

    def warn_if_rounding(self, differences: Tensor, loss: float | None = None) -> None:
        """Warn, once per group, when loss differences are near the rounding of the loss itself."""
        if loss is None:
            loss = float(self.losses.abs().median())
        unit = torch.finfo(differences.dtype).eps * max(1.0, abs(loss))
        median = float(differences.abs().median())
        if median < ROUNDING_UNITS * unit and not self.memory.get("warned_of_rounding"):
            self.memory["warned_of_rounding"] = True
            nothing = " (or the loss does not depend on this group)" if median == 0 else ""
            warnings.warn(
                f"group '{self.name}': the median loss difference {median:.1e} is under "
                f"{ROUNDING_UNITS} rounding units ({unit:.1e} each): rounding is felt in the "
                f"slopes of easy points; raise sigma{nothing}, or see `flops.diagnose`",
                PrecisionWarning,
                stacklevel=_outside(),
            )


def _outside() -> int:
    """How far up the stack the user's code is, for warnings that point there."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("flops."):
        level, frame = level + 1, frame.f_back
    return level


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
