"""Changes of moments that replicas sum: as matrices of short axes, by products of long ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.joint_moments import joint_changes
from flops.subspace.moments import DENSE, Change, Factor


class Others(Replicas):
    """Of two replicas one; the other's tensors are given in the order in which they are summed."""

    def __init__(self, theirs: list[Tensor]) -> None:
        super().__init__(3)
        self.sizes, self._theirs = (3, 3), theirs

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t + self._theirs.pop(0).to(t) for t in tensors]


def change(size: int, seed: int, rows: int = 6) -> Change:
    source = torch.Generator().manual_seed(seed)
    plus, minus = torch.randn(2, rows, size, generator=source, dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(size, 2, generator=source, dtype=torch.float64)).Q
    return Change(plus, minus, 0.3, vectors, torch.tensor([0.5, 2.0]).double())


def test_short_axes_send_a_triangle_and_have_the_sum_of_both() -> None:
    mine, other = [change(5, 0), change(3, 1)], [change(5, 2), change(3, 3)]
    sent = [
        c.matrix()[torch.triu_indices(n, n).unbind()] for c, n in zip(other, (5, 3), strict=True)
    ]
    assert [len(t) for t in sent] == [15, 6]
    found = joint_changes(mine, Others(sent))
    for both, a, b in zip(found, mine, other, strict=True):
        whole = a.matrix() + b.matrix()
        torch.testing.assert_close(both.matrix(), whole)
        torch.testing.assert_close(torch.tensor(both.trace()), whole.trace().float())
        x = torch.randn(len(whole), 4).double()
        torch.testing.assert_close(both.times(x), whole @ x)


def test_long_axes_send_products() -> None:
    """Three products with the columns of a sketch; it is that of all rows in one process."""
    size = DENSE + 10
    mine, other = change(size, 0), change(size, 1)
    whole = Change(
        torch.cat([mine.plus, other.plus]),
        torch.cat([mine.minus, other.minus]),
        mine.floor + other.floor,
        torch.cat([mine.vectors, other.vectors], 1),
        torch.cat([mine.cover, other.cover]),
    )
    sent: list[Tensor] = []

    class Recorded(Others):
        def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
            if not tensors:  # there are no short axes
                return []
            (mine_now,) = tensors
            if mine_now.dim() == 1:  # the trace
                return [mine_now + other.trace()]
            sent.append(mine_now)
            return [whole.times(columns[len(sent) - 1])]

    columns: list[Tensor] = []
    (joint,) = joint_changes([mine], Recorded([]))
    times = joint.times

    def seen(x: Tensor) -> Tensor:
        columns.append(x)
        return times(x)

    object.__setattr__(joint, "times", seen)
    start = Factor.empty(size, torch.float64)
    found, expected = start.updated(0.9, joint, 1), start.updated(0.9, whole, 1)
    assert len(sent) == 3
    torch.testing.assert_close(sent[0], mine.times(columns[0]))
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(torch.tensor(found.trace), torch.tensor(expected.trace))
