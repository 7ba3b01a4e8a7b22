"""Counts set by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Signal
from flops.errors import QueryError


@dataclass(frozen=True)
class Fixed(Allocator):
    """The same counts in every step; they, not `queries`, set the budget.

    Args:
        counts: Queries of each point of the batch.
    """

    counts: Sequence[int] | Tensor

    def __post_init__(self) -> None:
        """Raise if a count would be rounded.

        Raises:
            QueryError: If the counts are not one whole number per point.
        """
        try:
            counts = torch.as_tensor(self.counts)
        except (TypeError, ValueError):
            counts = torch.empty(0)
        if counts.dim() != 1 or counts.dtype not in (torch.int64, torch.int32):
            raise QueryError(f"counts must be one whole number per point, not {self.counts!r}")

    def __repr__(self) -> str:
        counts = torch.as_tensor(self.counts).tolist()
        if len(counts) <= 8:
            return f"Fixed({counts})"
        return f"Fixed({len(counts)} counts of {min(counts)} to {max(counts)})"

    def allocate(self, signal: Signal) -> Tensor:
        """The given counts.

        Raises:
            QueryError: If they do not fit the batch or the estimator's unit.
        """
        counts = torch.as_tensor(self.counts, dtype=torch.long)
        if len(counts) != len(signal.losses):
            raise QueryError(f"{len(counts)} counts were given for {len(signal.losses)} points")
        if bool((counts < signal.minimum).any()) or bool((counts % signal.unit).any()):
            raise QueryError(
                f"group '{signal.group}': counts must be multiples of {signal.unit}, at least "
                f"{signal.minimum}"
            )
        return counts
