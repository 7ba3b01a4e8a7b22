"""Bernoulli: easy points are pruned with probability p."""

from __future__ import annotations

import pytest
import torch

from flops.allocators import Bernoulli
from tests.support.allocation import check, sampled, signal, traces


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_bernoulli_prunes_easy_points_with_probability_p(p: float) -> None:
    losses = torch.tensor([0.0, 0.1, 0.2, 0.3, 3.0, 4.0])  # four lie below the mean
    pruned = []
    for step in range(400):
        batch = signal(losses, 24, key=(0, step, 0))
        counts = Bernoulli(p=p).allocate(batch)
        check(counts, batch)
        half = counts == 12
        assert not half[4:].any()
        others = counts[~half]
        # What was pruned is shared equally; rounding leaves a difference of one.
        assert int(others.max() - others.min()) <= 1
        assert float(others.double().mean()) == pytest.approx(24 + 12 * half.sum() / len(others))
        pruned.append(half[:4].double())
    rate = float(torch.stack(pruned).mean())
    assert abs(rate - p) < 5 * (p * (1 - p) / 1600) ** 0.5 + 1e-12


def test_bernoulli_learns_whether_to_prune() -> None:
    losses = torch.linspace(0, 2, 40)
    chances = {}
    for name, true in {"small": losses**2 + 0.01, "large": (2 - losses) ** 2 + 0.01}.items():
        allocator = Bernoulli(p=None)
        assert allocator.probability == 0.5
        for step in range(30):
            allocator.learn(signal(losses, 20, key=(0, step, 0)), sampled(true.double(), 5, step))
        chances[name] = allocator.probability
    assert chances["small"] > 0.9
    assert chances["large"] < 0.1


def test_bernoulli_given_p_does_not_learn() -> None:
    allocator = Bernoulli(p=0.3)
    allocator.learn(signal(torch.rand(10)), traces(torch.rand(10)))
    assert allocator.probability == 0.3
    with pytest.raises(ValueError, match="between 0 and 1"):
        Bernoulli(p=1.2)


@pytest.mark.parametrize(("sign", "logit"), [(1, 4.0), (-1, -4.0)])
def test_bernoulli_never_becomes_certain(sign: int, logit: float) -> None:
    """Steps of 0.2 up to 4: a task that changes must be able to turn it."""
    losses = torch.linspace(0, 2, 40)
    true = (losses if sign > 0 else 2 - losses) ** 4 + 1e-3
    allocator, seen = Bernoulli(p=None), []
    for step in range(40):
        allocator.learn(signal(losses, 20, key=(0, step, 0)), traces(true))
        seen.append(float(allocator.state_dict()["logit"]))
    assert seen[0] == pytest.approx(sign * 0.2)
    assert max(seen, key=abs) == logit
    assert seen[-1] == pytest.approx(logit, abs=0.21)


def test_bernoulli_learns_from_two_points_and_not_from_one() -> None:
    for size, logit in ((1, 0.0), (2, 0.2)):
        allocator = Bernoulli(p=None)
        losses = torch.tensor([0.1, 2.0])[:size]
        allocator.learn(signal(losses, 20), traces(1e-6 * losses**4))
        assert abs(float(allocator.state_dict()["logit"])) == pytest.approx(logit)
        other = Bernoulli(p=None)
        other.load_state_dict(allocator.state_dict())
        assert other.probability == allocator.probability
    allocator = Bernoulli(p=None)
    allocator.learn(signal(torch.rand(5)), traces(torch.zeros(5)))
    assert allocator.probability == 0.5
