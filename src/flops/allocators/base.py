"""The extension point for query allocators: one file, one class that has these members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
    """

    losses: Tensor
    budget: int
    unit: int
    minimum: int
    group: str
    index: Tensor | None = None


@runtime_checkable
class Allocator(Protocol):
    """Decides how many queries each point of a batch gets.

    The engine keeps one copy per group, so an allocator may hold what it learned in attributes.
    """

    def allocate(self, signal: Signal) -> Tensor:
        """Counts, a LongTensor of shape (B,): multiples of the unit that sum to the budget."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What was learned, for resuming."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...
