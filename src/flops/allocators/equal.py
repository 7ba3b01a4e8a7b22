"""Equal allocation: every point gets the same number of queries (the paper's EA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Signal
from flops.allocators.counts import too_few


@dataclass(frozen=True)
class Equal(Allocator):
    """A_j = budget / B; the first points get the remainder."""

    def allocate(self, signal: Signal) -> Tensor:
        """Equal counts.

        Raises:
            QueryError: If the budget is too small for the floor.
        """
        size, unit = len(signal.losses), signal.unit
        draws, left = divmod(signal.budget // unit, size)
        if draws * unit < signal.minimum or signal.budget < unit:
            raise too_few(signal.budget, size, signal.minimum, unit)
        return unit * (draws + (torch.arange(size) < left).long())
