"""Order of points: each epoch visits all of them once, in batches, in an order set by the seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.perturb.random import generator

ORDER = 11  # stream of the order of points, distinct from those of noise


@dataclass(frozen=True)
class Order:
    """Batches of points; the last of an epoch may be short."""

    points: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.points < 1 or self.batch < 1:
            raise FlopsError(
                f"need at least one point and a batch of one: {self.points}, {self.batch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""
        size = min(self.batch, self.points)
        return -(-self.points // size)

    def at(self, step: int) -> Tensor:
        """Points of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(self.points, generator=generator(self.seed, epoch, ORDER))
        size = min(self.batch, self.points)
        return order[place * size : (place + 1) * size]
