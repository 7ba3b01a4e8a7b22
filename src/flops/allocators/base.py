"""Base class of query allocators, and its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """Inputs of an allocator: available for a black box, too.

    Attributes:
        losses: Clean losses, shape (B,).
        budget: Total queries, a multiple of the unit.
        unit: Queries per draw: 1, or 2 for antithetic pairs.
        minimum: Minimum queries of a point, a multiple of the unit.
        group: Name of the group.
        index: Positions of the points in the data set, if given.
        embeddings: Representations of the points, shape (B, E), if the allocator needs them.
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
        """The signal of a subset or permutation of the points, with the same budget."""
        return replace(
            self,
            losses=self.losses[points],
            index=None if self.index is None else self.index[points],
            embeddings=None if self.embeddings is None else self.embeddings[points],
        )


@dataclass(frozen=True)
class Traces:
    """Estimated noise of each point's gradient estimate.

    Attributes:
        values: Tr_j, the trace of the covariance of one draw, shape (B,); 0 for a point without
            draws.
        draws: Number of draws of each point, shape (B,).
    """

    values: Tensor
    draws: Tensor

    def __repr__(self) -> str:
        return f"Traces({len(self.values)} points, {int(self.draws.sum())} draws)"

    def at(self, points: Tensor) -> Traces:
        """The traces of a subset or permutation of the points."""
        return Traces(self.values[points], self.draws[points])


class Allocator(ABC):
    """Determines the number of queries of each point of a batch.

    The engine keeps one copy per group, so an allocator may have learned state in attributes; it
    must replace them, never modify them in place, so that a failed step keeps the old state.

    Attributes:
        min_queries: Minimum queries of a point.
        pilot: Queries per point before the allocation, to learn from on the same batch; 0 learns
            from the queries of a step for the next one.
        wants_embeddings: Whether `Signal.embeddings` is needed.
        across_groups: Whether groups share one total budget by their demand.
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
        """Learned state, for resuming."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        return


class Learner(Allocator):
    """An allocator that learns from the queries.

    Attributes:
        most_points: Largest number of points to learn from where data-parallel ranks join theirs:
            the work is repeated by each, so it must not grow with their number. None for all.
    """

    most_points: int | None = 512

    @abstractmethod
    def learn(self, signal: Signal, traces: Traces) -> None:
        """Learn from the traces of this batch; under data parallelism, of all ranks' batches."""

    def note_own(self, signal: Signal, traces: Traces) -> None:
        """What this rank's own points have shown, after `learn` from those of all ranks."""
        return
