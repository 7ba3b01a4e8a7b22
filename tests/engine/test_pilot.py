"""A pilot's weight: q / (q + mean later count) for every point, however the rest is spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.allocators.base import Allocator, Signal
from flops.engine.pilot import PILOT, pilot_share
from tests.support.noise import noise

SIZE, D, Q, LATER = 4, 3, 2, 6
SPREADS = [[6, 6, 6, 6], [2, 4, 8, 10], [20, 2, 1, 1], [1, 1, 1, 21], [0, 0, 12, 12]]


class Spread(Allocator):
    """A pilot of Q queries, then counts given by hand."""

    pilot, min_queries = Q, 0

    def __init__(self, counts: list[int]) -> None:
        self.counts = torch.tensor(counts)

    def allocate(self, signal: Signal) -> Tensor:
        return self.counts


def linear(outputs: Tensor, g: Tensor) -> Tensor:
    return (outputs * g).sum(1)


def rows(estimator: Any, counts: list[int], g: Tensor) -> tuple[Tensor, Any]:
    """Gradient of a table of which every point reads a row of its own, and the report."""
    model = nn.Embedding(SIZE, D).double()
    group = Group(model, estimator, Q + LATER, name="g")
    report = ForwardGradient(model, linear, group, allocator=Spread(counts)).estimate(
        torch.arange(SIZE), g
    )
    return model.weight.grad * SIZE, report


def mean_estimate(g: Tensor, key: tuple[int, ...], draws: int) -> Tensor:
    """Mean of (g z) z over the draws of a key; 0 without any."""
    z = noise("gaussian", key, draws, D)
    return (z @ g) @ z / max(1, draws)


@pytest.mark.parametrize("counts", SPREADS)
def test_it_is_the_same_for_all_points(counts: list[int]) -> None:
    g = torch.randn(SIZE, D).double()
    found, report = rows(LikelihoodRatio(1e-3), counts, g)
    share = Q / (Q + LATER)
    for j in range(SIZE):
        early = mean_estimate(g[j], (0, 0, 0, PILOT, j), Q)
        later = mean_estimate(g[j], (0, 0, 0, j), counts[j])
        expected = share * early + (1 - share) * later
        torch.testing.assert_close(found[j], expected, rtol=1e-6, atol=1e-6)
    assert report.counts["g"].tolist() == [Q + n for n in counts]


@pytest.mark.parametrize("counts", SPREADS)
def test_the_share_goes_by_the_mean(counts: list[int]) -> None:
    first = torch.full((SIZE,), Q)
    assert pilot_share(first, torch.tensor(counts)) == Q / (Q + LATER)


@pytest.mark.parametrize("counts", [[6, 6, 6, 6], [2, 4, 8, 10], [0, 0, 12, 12]])
def test_pairs_count_as_two(counts: list[int]) -> None:
    g, share = torch.randn(SIZE, D).double(), Q / (Q + LATER)
    found, _ = rows(LikelihoodRatio(1e-3, baseline="antithetic"), counts, g)
    for j in range(SIZE):
        early = mean_estimate(g[j], (0, 0, 0, PILOT, j), Q // 2)
        later = mean_estimate(g[j], (0, 0, 0, j), counts[j] // 2)
        expected = share * early + (1 - share) * later
        torch.testing.assert_close(found[j], expected, rtol=1e-6, atol=1e-6)
