"""An optimizer that records the gradients of its steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Recorded(torch.optim.SGD):
    """Keeps the gradients that it was given."""

    def __init__(self, parameters: list[nn.Parameter], rate: float = 0.0) -> None:
        super().__init__(parameters, rate)
        self.seen: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.seen.append(self.param_groups[0]["params"][0].grad.clone())
        super().step(closure)
