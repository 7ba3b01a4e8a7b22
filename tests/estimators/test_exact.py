"""Backpropagation as an estimator, also on a rank that has no points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flops import Exact, ForwardGradient, Group
from flops.passes.local_vjp import Gradients
from flops.passes.ranks import Ranks
from tests.conftest import exact, gradients, squared


class Last(Ranks):
    """The second of two ranks, with no points of its own; the other one has all."""

    rank, size = 1, 2

    def __init__(self, losses: Tensor, found: Gradients) -> None:
        self._losses, self._found = losses, found

    def shard(self, count: int, unit: int = 1) -> tuple[int, int]:
        return count, count

    def all_sum(self, tensor: Tensor) -> Tensor:
        assert not tensor.any()
        return tensor + self._losses.to(tensor)

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        assert found == {}
        return {p: self._found[p].clone() for p in parameters}


def test_a_rank_without_points_has_the_gradient_of_the_others() -> None:
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    truth = exact(model, squared, x, y)
    other = {p: truth[name] for name, p in model.named_parameters()}
    losses = squared(model(x), y).detach()
    model.zero_grad()
    groups = [Group(model, Exact(), queries=1)]
    report = ForwardGradient(model, squared, groups, process_group=Last(losses, other)).estimate(
        x, y
    )
    assert report.loss == float(losses.mean())
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, truth[name])
