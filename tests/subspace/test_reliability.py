"""Reliability: the expected cosine of an estimate, and groups that are withheld by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.engine.budgets import LOOK, PATIENCE
from flops.optim import step_as_gradients_appear
from tests.conftest import exact, flat, gradients
from tests.support.planted import planted


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1)


class Opaque(nn.Module):
    """A wide site whose gradient has a direction of its own at each point: nothing is learned."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.size = nn.Linear(3, size), size
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor, secret: Tensor) -> Tensor:
        h = self.first(x)
        return (h * secret).sum(1) + self.last(x).square().sum(1)


def take(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def opaque(withhold: float, queries: Any = 8) -> tuple[Opaque, ForwardGradient]:
    torch.manual_seed(0)
    model = Opaque(400).double()
    estimator = LikelihoodRatio(1e-5, shaping=Shaping(withhold=withhold))
    groups = [Group(model.first, estimator, queries), Group(model.last, estimator, queries)]
    return model, ForwardGradient(model, take, groups)


def inputs(step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 3, generator=source).double(),
        "secret": torch.randn(8, 400, generator=source).double(),
    }


def test_a_group_that_is_mostly_noise_leaves_its_gradients_alone() -> None:
    """Torch's optimizers skip parameters without a gradient."""
    model, fg = opaque(0.3)
    always, free = opaque(0.0)
    for step in range(12):
        model.zero_grad()
        report = fg.estimate(inputs(step), exact=True)
        free.estimate(inputs(step))
        if step:
            assert report.shaping["first"].reliability < 0.3
            assert report.shaping["first"].withheld
            assert abs(report.cosine["first"]) < 0.5  # known, though it is not written
            assert model.first.weight.grad is None
            assert model.last.weight.grad is not None
            assert report.counts["first"].sum() == 64  # it goes on learning
    assert always.first.weight.grad is not None


def test_hooks_of_other_groups_do_not_wait_for_it() -> None:
    model, fg = opaque(0.3)
    fg.estimate(inputs(0))
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    with step_as_gradients_appear(torch.optim.SGD(model.parameters(), 0.1)):
        fg.estimate(inputs(1))
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, True]


def test_automatic_queries_go_to_the_others() -> None:
    """A group that stays unreliable is looked at now and then; the others are not touched."""
    model, fg = opaque(0.3, "auto")
    seen = []
    for step in range(PATIENCE + 2 * LOOK + 2):
        model.zero_grad()
        report = fg.estimate(inputs(step))
        seen.append(int(report.counts["first"].sum()))
        assert int(report.counts["last"].sum()) > 0
        assert report.dropped["first"] == (8 if seen[-1] == 0 else 0)
        assert report.queries == sum(int(c.sum()) for c in report.counts.values())
    late = seen[PATIENCE + 2 :]
    assert late.count(0) == len(late) - 2
    assert max(late) == 8 * 16
    state = fg.state_dict()
    fg.load_state_dict(state)
    fg.estimate(inputs(99))


def test_a_reliable_group_is_written() -> None:
    model, x, y = planted(1)
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(withhold=0.9))
    fg = ForwardGradient(model, squared, Group(model.target, estimator, 8, name="site"))
    for _ in range(60):
        model.zero_grad()
        report = fg.estimate(x, y, exact=True)
    assert report.shaping["site"].reliability > 0.99
    assert report.cosine["site"] > 0.99


def test_the_reliability_is_the_cosine_of_a_points_estimate() -> None:
    """In one batch of one point at a time, whose gradient has known and unknown parts."""
    torch.manual_seed(0)
    size, rank = 40, 4
    common = torch.linalg.qr(torch.randn(size, rank).double()).Q
    model = nn.Sequential(nn.Linear(5, size)).double()
    secret = torch.randn(64, size).double() * 0.12
    reads = torch.randn(64, rank).double() @ common.T + secret

    def loss(outputs: Tensor, which: Tensor) -> Tensor:
        return (outputs * reads[which]).sum(1)

    estimator = LikelihoodRatio(1e-5, shaping=Shaping(outputs=False, withhold=0))
    fg = ForwardGradient(model, loss, Group(model[0], estimator, 8, name="site"))
    bias: list[float] = []
    said: list[float] = []
    for step in range(160):
        which = torch.randperm(64)[:16]
        x = torch.randn(16, 5).double()
        report = fg.estimate(x, which)
        if step >= 100 and step % 3 == 0:
            said.append(report.shaping["site"].reliability)
            single = []
            for i in range(16):
                model.zero_grad()
                state = fg.state_dict()
                fg.estimate(x[i : i + 1], which[i : i + 1])
                fg.load_state_dict(state)
                bias_gradient = model[0].bias.grad
                assert bias_gradient is not None
                single.append(float(F.cosine_similarity(bias_gradient, reads[which[i]], 0)))
            bias.append(sum(c * c for c in single) / 16)
    true = math.sqrt(sum(bias) / len(bias))
    assert sum(said) / len(said) == pytest.approx(true, abs=0.06)
    assert 0.5 < true < 0.98


def test_unbiased_estimates_are_always_written() -> None:
    model, x, y = planted(1)
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(withhold=0.9, unbiased=True))
    fg = ForwardGradient(model, squared, Group(model.target, estimator, 4, name="site"))
    for _ in range(3):
        fg.estimate(x, y)
    assert float(flat(gradients(model)).norm()) > 0
    assert len(exact(model, squared, x, y))


def test_options() -> None:
    with pytest.raises(ValueError, match=r"withhold must lie in \[0, 1\), not 1"):
        Shaping(withhold=1)
    assert repr(Shaping(withhold=0.5)) == "Shaping(withhold=0.5)"
