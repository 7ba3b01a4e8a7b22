"""Budgets that groups share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    ForwardGradient,
    Group,
)
from flops.allocators import Neyman
from tests.support.scaled import LEAF, QUERIES, SCALES, SIZE, Net, scaled


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SIZE, 3).double()


# Several groups


def two(model: Net, allocator: Any, queries: tuple[float, float] = (10, 10)) -> ForwardGradient:
    groups = [
        Group([model.first, model.second], LEAF, queries[0], name="early"),
        Group(model.head, LEAF, queries[1], name="late"),
    ]
    return ForwardGradient(model, scaled, groups, allocator=allocator)


def test_across_groups_moves_queries_and_keeps_the_cost(model: Net, x: Tensor) -> None:
    fg = two(model, Neyman(across_groups=True))
    first = fg.estimate(x, SCALES)
    assert all(int(c.sum()) == QUERIES * SIZE for c in first.counts.values())
    for _ in range(10):
        report = fg.estimate(x, SCALES)
    costs = [r.forward_equivalents.queries for r in (first, report)]
    assert costs[1] == pytest.approx(costs[0], rel=0.05)
    # The early group has more outputs, so more noise, and the late one's queries are cheaper: by
    # the ratio of demand / sqrt(cost).
    demand = {n: float(fg.memory[n]["demand"]) for n in fg.memory}
    price = {n: float(fg.memory[n]["query_cost"]) for n in fg.memory}
    counts = {n: int(c.sum()) for n, c in report.counts.items()}
    expected = (demand["early"] / demand["late"]) * (price["late"] / price["early"]) ** 0.5
    assert counts["early"] / counts["late"] == pytest.approx(expected, rel=0.1)
    assert price["late"] < price["early"]


def test_across_groups_gives_more_to_the_noisier_group(x: Tensor) -> None:
    """Two alike towers; the outputs of one are wide, so its estimate is far noisier."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + torch.tanh(self.right(x)).view(-1, 20, 2).mean(1)

    model = Towers().double()
    groups = [Group(m, LEAF, 10, name=n) for n, m in model.named_children()]
    fg = ForwardGradient(model, scaled, groups, allocator=Neyman(across_groups=True), reuse=False)
    for _ in range(8):
        report = fg.estimate(x, SCALES)
    left, right = (int(report.counts[n].sum()) for n in ("left", "right"))
    assert right > 1.5 * left
    assert left + right == pytest.approx(2 * 10 * SIZE, abs=2)


@pytest.mark.parametrize(
    ("pilot", "queries"), [(0, (1, 1)), (0, (1, 30)), (2, (3, 20)), (2, (3, 3))]
)
def test_across_groups_works_at_the_lowest_budgets(
    pilot: int, queries: tuple[float, float], model: Net, x: Tensor
) -> None:
    fg = two(model, Neyman(across_groups=True, pilot=pilot), queries)
    configured = fg.estimate(x, SCALES).forward_equivalents.queries
    for _ in range(6):
        report = fg.estimate(x, SCALES)
        assert report.forward_equivalents.queries <= configured * 1.01
        assert all(int(c.min()) >= pilot + 1 for c in report.counts.values())


def test_budgets_stay_without_across_groups(model: Net, x: Tensor) -> None:
    fg = two(model, Neyman(), (10, 6))
    for _ in range(4):
        report = fg.estimate(x, SCALES)
    assert [int(c.sum()) for c in report.counts.values()] == [80, 48]
    assert fg.budgets(SIZE) == {"early": 80, "late": 48}
