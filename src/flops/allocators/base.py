"""The extension point for query allocators: one file, one class that has these members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """What an allocator may know about a batch: only what a black box shows.

    Attributes:
        losses: Clean losses, shape (B,).
        budget: Queries in all, a multiple of the unit.
        unit: Queries per draw: 1, or 2 for antithetic pairs.
        minimum: Fewest queries of a point, a multiple of the unit.
        group: Name of the group.
        index: Positions of the points in the data set, if given.
        embeddings: Representations of the points, shape (B, E), if the allocator wants them.
        key: (seed, step, group), for random choices of the allocator.
    """

    losses: Tensor
    budget: int
    unit: int
    minimum: int
    group: str
    index: Tensor | None = None
    embeddings: Tensor | None = None
    key: tuple[int, ...] = (0,)

    def __repr__(self) -> str:
        what = f"group={self.group!r}, {len(self.losses)} points, budget={self.budget}"
        return f"Signal({what}, unit={self.unit}, minimum={self.minimum})"

    def at(self, points: Tensor) -> Signal:
        """The signal of some of the points, or of all in another order; the budget stays."""
        return replace(
            self,
            losses=self.losses[points],
            index=None if self.index is None else self.index[points],
            embeddings=None if self.embeddings is None else self.embeddings[points],
        )


@dataclass(frozen=True)
class Traces:
    """What a step's queries showed about the noise of each point's estimate.

    Attributes:
        values: Tr_j, the trace of the covariance of one draw, shape (B,); 0 for a point without
            draws.
        draws: Number of draws behind it, shape (B,).
    """

    values: Tensor
    draws: Tensor

    def __repr__(self) -> str:
        return f"Traces({len(self.values)} points, {int(self.draws.sum())} draws)"

    def at(self, points: Tensor) -> Traces:
        """Those of some of the points, or of all in another order."""
        return Traces(self.values[points], self.draws[points])


class Allocator(ABC):
    """Decides how many queries each point of a batch gets.

    The engine keeps one copy per group, so an allocator may hold what it learned in attributes;
    it replaces them and never writes into them, so that a failed step leaves the old ones.

    Attributes:
        min_queries: Fewest queries of a point.
        pilot: Queries per point that are made before allocating, to learn from on this very
            batch; 0 learns from the queries of a step for the next one.
        wants_embeddings: Whether `Signal.embeddings` is needed.
        across_groups: Whether groups share one total budget by what they need.
    """

    min_queries: int = 1
    pilot: int = 0
    across_groups: bool = False

    @property
    def wants_embeddings(self) -> bool:  # noqa: D102
        return False

    @abstractmethod
    def allocate(self, signal: Signal) -> Tensor:
        """Counts, a LongTensor of shape (B,): multiples of the unit that sum to the budget."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, for resuming."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        return


class Learner(Allocator):
    """An allocator that learns from the queries."""

    @abstractmethod
    def learn(self, signal: Signal, traces: Traces) -> None:
        """Take in what the queries of this batch showed."""
