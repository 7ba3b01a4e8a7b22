"""Replicas: the ranks that hold other points of the same step (data parallel).

A step's batch is the concatenation of the batches of all replicas, in the order of their ranks.
Every replica runs the queries of its own points. What is learned from a step follows from sums over
the points, and everybody adds theirs: so all replicas learn the same, that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flops.passes.local_vjp import Gradients


class Replicas:
    """One replica, which holds all points of the step; others are in `flops.engine.data_parallel`.

    Args:
        points: Points of its batch.

    Attributes:
        rank: Number of this replica.
        sizes: Points of each replica.
    """

    def __init__(self, points: int) -> None:
        self.rank = 0
        self.sizes: tuple[int, ...] = (points,)

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return len(self.sizes) > 1

    @property
    def total(self) -> int:
        """Points of the step, on all replicas."""
        return sum(self.sizes)

    @property
    def offset(self) -> int:
        """Number of this replica's first point among all."""
        return sum(self.sizes[: self.rank])

    @property
    def share(self) -> float:
        """This replica's share of the points."""
        return self.sizes[self.rank] / self.total

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the replicas, of tensors with the same shapes on all, in one message.

        Sums are bitwise equal on all replicas.
        """
        return list(tensors)

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all replicas, of which each has ``sizes``, in the order of their ranks."""
        return rows

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the replicas."""
        return tensor

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sums of the replicas' gradients, some of which may be missing."""
        return found
