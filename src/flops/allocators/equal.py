"""Equal allocation: every point gets the same number of queries (the paper's EA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flops.allocators.base import Signal
from flops.engine.rows import round_counts


@dataclass(frozen=True)
class Equal:
    """A_j = budget / B, with what is left over given to the first points."""

    def allocate(self, signal: Signal) -> Tensor:
        """Equal counts."""
        shares = torch.ones(len(signal.losses))
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is learned."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
