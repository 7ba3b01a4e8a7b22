"""Equal allocation: every point gets the same number of queries (the paper's EA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.allocators.base import Allocator, Signal
from flops.allocators.rounding import round_counts


@dataclass(frozen=True)
class Equal(Allocator):
    """A_j = budget / B, with what is left over given to the first points."""

    def allocate(self, signal: Signal) -> Tensor:
        """Equal counts."""
        shares = torch.ones(len(signal.losses))
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)
