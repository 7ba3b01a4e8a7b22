"""Rewards: objectives that no derivative goes through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flops import BatchError, CoverageError, Exact, ForwardGradient, Group, LikelihoodRatio
from flops.losses import Reward, reward
from tests.conftest import flat, gradients


@reward
def nearness(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).square().sum(1)


def exact_match(outputs: Tensor, targets: list[str]) -> list[int]:
    words = ["yes", "no"]
    return [
        int(words[int(row.argmax())] == text) for row, text in zip(outputs, targets, strict=True)
    ]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


SOURCE = torch.Generator().manual_seed(3)
X, Y = torch.randn(6, 4, generator=SOURCE), torch.randn(6, 2, generator=SOURCE)


def test_its_gradient_is_that_of_the_negative_reward() -> None:
    model = net()
    groups = [Group(model, LikelihoodRatio(1e-3, targets="leaf"), 4000)]
    ForwardGradient(model, nearness, groups).estimate(X, Y)
    found = flat(gradients(model))
    model.zero_grad()
    (model(X) - Y).square().sum(1).mean().backward()
    truth = flat(gradients(model))
    assert float(torch.cosine_similarity(found, truth, dim=0)) > 0.97


@pytest.mark.filterwarnings("ignore:.*rounding units")  # most queries change no reward
def test_a_reward_with_steps_is_maximised() -> None:
    model, texts = net(), ["yes", "no", "yes", "yes", "no", "no"]
    groups = [Group(model, LikelihoodRatio(0.3, targets="leaf"), 32)]
    fg = ForwardGradient(model, reward(exact_match), groups)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    before = sum(exact_match(model(X), texts))
    for _ in range(60):
        optimizer.zero_grad()
        report = fg.estimate(X, texts)
        optimizer.step()
    assert before < 5
    assert sum(exact_match(model(X), texts)) == 6
    assert report.loss == pytest.approx(-1, abs=0.2)


def test_backpropagation_refuses_it() -> None:
    model = net()
    fg = ForwardGradient(model, nearness, [Group(model, Exact())])
    with pytest.raises(CoverageError, match=r"the loss is a reward.*use LikelihoodRatio"):
        fg.estimate(X, Y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_numbers_of_any_kind(kind: Any) -> None:
    losses = Reward(lambda outputs, targets: kind([1.0, 0.5]))(None, None)
    assert losses.tolist() == [-1.0, -0.5]
    assert not losses.requires_grad


def test_one_reward_for_the_batch_is_an_error() -> None:
    with pytest.raises(BatchError, match="do not average over the batch"):
        reward(lambda outputs, targets: outputs.mean())(X, Y)
    with pytest.raises(BatchError, match="numbers, one per row"):
        reward(lambda outputs, targets: ["good"])(X, Y)
    with pytest.raises(TypeError, match="takes a function"):
        reward(3)  # type: ignore[arg-type]
