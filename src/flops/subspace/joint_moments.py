"""Changes of second moments, summed over replicas.

Of a short axis they send a matrix, of a long one its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flops.passes.ranks import Replicas


class OwnChange(Protocol):
    """The change of a moment by this replica's points, as `flops.subspace.moments.Change`."""

    def times(self, x: Tensor) -> Tensor:
        """The change applied to columns."""
        ...

    def trace(self) -> float:
        """Its trace."""
        ...

    def dense(self) -> Tensor | None:
        """Its matrix, if the axis is short."""
        ...


@dataclass(frozen=True)
class JointChange:
    """The sum of the replicas' changes.

    Attributes:
        own: The change by this replica's points.
        whole: The sum of all, for a short axis; else None.
        replicas: The replicas.
    """

    own: OwnChange
    whole: Tensor | None
    replicas: Replicas

    def times(self, x: Tensor) -> Tensor:
        """The change applied to columns."""
        if self.whole is not None:
            return self.whole @ x
        return self.replicas.sum([self.own.times(x)])[0]

    def trace(self) -> float:
        """Its trace."""
        if self.whole is not None:
            return float(self.whole.trace())
        mine = torch.tensor([self.own.trace()], dtype=torch.float64)
        return float(self.replicas.sum([mine])[0])

    def matrix(self) -> Tensor:
        """Its matrix."""
        assert self.whole is not None
        return self.whole


def joint_changes(changes: Sequence[OwnChange], replicas: Replicas) -> list[JointChange]:
    """The sums of the replicas' changes; one message for all short axes."""
    own = [change.dense() for change in changes]
    wholes = iter(joint_symmetric([m for m in own if m is not None], (), replicas)[0])
    pairs = zip(changes, own, strict=True)
    return [JointChange(c, None if m is None else next(wholes), replicas) for c, m in pairs]


def joint_symmetric(
    matrices: Sequence[Tensor], others: Sequence[Tensor], replicas: Replicas
) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of symmetric matrices, which send a triangle, and of other tensors, in one message."""
    places = [torch.triu_indices(len(m), len(m), device=m.device) for m in matrices]
    halves = [m[a, b] for m, (a, b) in zip(matrices, places, strict=True)]
    sums = replicas.sum([*halves, *others])
    wholes = [torch.zeros_like(matrix) for matrix in matrices]
    for whole, (a, b), half in zip(wholes, places, sums, strict=False):
        whole[a, b] = half
        whole[b, a] = half
    return wholes, sums[len(halves) :]
