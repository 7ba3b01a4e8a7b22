"""What an estimator sees of one step: the clean pass, its rows, and passes that are charged.

Everything an estimator runs goes through here, so every query is counted and every loss checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flops.errors import PrecisionWarning
from flops.guards import check_finite
from flops.local import Gradients, LocalTarget, add_gradients, local_products
from flops.plan import Rows, chunks, plan, spans
from flops.replay import Edit, Passes, Prefix, Record
from flops.script import Action
from flops.step_report import ShapingReport
from flops.structure import Call

ROUNDING_UNITS = 50


@dataclass
class Ledger:
    """Running totals of a step."""

    rows: int = 0
    queries: float = 0.0
    local: float = 0.0


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

    @property
    def size(self) -> int:
        """Number of points B."""
        return len(self.losses)

    def chunks(self, unit: int) -> Iterator[Rows]:
        """The rows of all queries, cut into chunks."""
        return chunks(plan(self.counts, unit), self.chunk, unit)

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
        check_finite(losses, f"a query of group '{self.name}'", points)
        self.ledger.rows += len(points)
        self.ledger.queries += len(points) * (1 - prefix.share)
        return losses

    def batch_mean(self, prefix: Prefix, around: Mapping[int, Action]) -> Tensor:
        """Mean loss of all points under one change that they share; charged."""
        parts = [torch.arange(a, b) for a, b in spans(self.size, self.chunk)]
        losses = [self.run(prefix, points, around=around) for points in parts]
        return torch.cat(losses).mean()

    def local(
        self,
        prefix: Prefix,
        targets: Sequence[LocalTarget],
        deltas: Mapping[int, Mapping[int, Tensor]],
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> Gradients:
        """Local products of all points; charged. See `flops.local`.

        Deltas of shape (B, ...) have their batch first here. ``watch`` sees the points, each
        target and its arguments.
        """
        total: Gradients = {}
        calls = self.passes.structure.calls
        for begin, end in spans(self.size, self.chunk):
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
        self.ledger.local += self.size * self._local_share(prefix, targets)
        return total

    def _local_share(self, prefix: Prefix, targets: Sequence[LocalTarget]) -> float:
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
                stacklevel=5,
            )


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
