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
    """The sums of the replicas' changes; one message for all short axes, by their triangles."""
    own = [change.dense() for change in changes]
    short = [matrix for matrix in own if matrix is not None]
    places = [torch.triu_indices(len(m), len(m), device=m.device) for m in short]
    halves = [m[a, b] for m, (a, b) in zip(short, places, strict=True)]
    sums = iter(zip(places, replicas.sum(halves), strict=True))
    found = []
    for change, matrix in zip(changes, own, strict=True):
        whole = None
        if matrix is not None:
            (a, b), half = next(sums)
            whole = torch.zeros_like(matrix)
            whole[a, b] = half
            whole[b, a] = half
        found.append(JointChange(change, whole, replicas))
    return found
