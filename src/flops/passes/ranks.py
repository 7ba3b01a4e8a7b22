"""Ranks: the processes that take a step together; here a single one.

Ranks may share the rows of one batch (`Ranks`), or hold other points of the same step (`Replicas`,
data parallel); `flops.engine.collectives` has those of a process group.

With replicas, a step's batch is the concatenation of the batches of all, in the order of their
ranks. Every replica runs the queries of its own points. What is learned from a step follows from
sums over the points, and everybody adds theirs: so all replicas learn the same, that of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from flops.passes.batch import Batch
from flops.passes.local_vjp import Gradients

ProcessGroup = Any  # torch's type is missing if torch was built without it
Parallel = Literal["data", "query"]
AXES = ("data", "query")


class Ranks:
    """The ranks that share the rows of a step; this base class is a single process.

    Attributes:
        rank: Rank of this process.
        size: World size.
        sent: Total size in bytes of this rank's messages.
        messages: Number of this rank's messages.
    """

    rank: int = 0
    size: int = 1
    sent: int = 0
    messages: int = 0

    def shard(self, count: int, unit: int = 1) -> tuple[int, int]:
        """First and last + 1 of this rank's rows, in whole units."""
        return 0, count

    def bounds(self, costs: Sequence[float], size: int) -> list[int]:
        """Bounds of the ranks' shares of rows, ``size`` of each cost in turn."""
        return [0, size * len(costs)]

    def all_gather(self, mine: Tensor, begin: int, total: int) -> Tensor:
        """Concatenated values of all ranks, on the CPU; this rank's start at ``begin``."""
        return mine

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum of the ranks' tensors."""
        return tensor

    def all_max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0, so that rounding cannot change the plan."""
        return tensor

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sums of the ranks' gradients, some of which may be missing."""
        return found

    def fail(self, error: BaseException, always: bool = False) -> None:
        """Tell the other ranks why this one does not go on."""

    def fitters(self, points: int) -> Replicas | None:
        """These ranks as replicas, each with its share of the points of one batch."""
        return None


class Replicas:
    """Ranks with other points of the step; this base class holds all of them.

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


class Axes:
    """Ranks that share queries with this one, and ranks with other points; here there are none."""

    def meet(
        self, batch: Batch, index: Tensor | None, run: Callable[..., Any], join: bool
    ) -> tuple[Ranks, Replicas]:
        """Ranks that share the rows, and those with other points, after checks of both.

        Args:
            batch: This rank's batch.
            index: Positions of its points in the data set.
            run: Fingerprint of the run, and of what else must be the same.
            join: Whether data-parallel ranks join their batches.
        """
        return Ranks(), Replicas(batch.size)

    def fail(self, error: BaseException) -> None:
        """Tell all of them why this one does not go on."""


def in_group(group: ProcessGroup | Ranks | Literal["auto"] | None, parallel: Parallel) -> bool:
    """Whether there is a process group; else a single process takes the step.

    Raises:
        ValueError: If its ranks are to share anything but points or queries, or if it is gone.
    """
    if parallel not in AXES:
        raise ValueError(f"parallel must be 'data' or 'query', not {parallel!r}")
    if isinstance(group, Ranks) or group is None:
        return group is not None
    initialised = dist.is_available() and dist.is_initialized()
    if not initialised and group != "auto":
        raise ValueError(
            "process_group was given, but torch.distributed is not initialised (any more); for a "
            "single process, set process_group=None"
        )
    return initialised
