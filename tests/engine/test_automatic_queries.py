"""queries="auto": the engine chooses the counts from what its own queries say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ES, ForwardGradient, Group, LikelihoodRatio, MeZO, Shaping
from flops.allocators import Neyman
from flops.allocators.progress import best_queries
from flops.engine.groups import FIRST
from flops.errors import QueryError
from tests.conftest import flat, gradients

UNITS = {"early": 1, "late": 1, "head": 1}


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*wide, nn.Linear(20, 4)).double()


def engine(model: nn.Sequential, shaping: Shaping | None = None) -> ForwardGradient:
    estimator = LikelihoodRatio(1e-5, "stage", shaping=shaping)
    groups = [
        Group([model[0], model[1]], estimator, "auto", name="early"),
        Group([model[2], model[3]], estimator, "auto", name="late"),
        Group(model[4], estimator, "auto", name="head"),
    ]
    return ForwardGradient(model, entropy, groups)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 20, generator=source).double()
    return x, x[:, :4].argmax(1)


@pytest.mark.parametrize("shaping", [None, Shaping()])
def test_counts_follow_progress_per_cost(shaping: Shaping | None) -> None:
    model = network()
    fg = engine(model, shaping)
    assert "auto, 16" in str(fg)
    first = fg.estimate(*batch(0))
    assert {int(c.sum()) for c in first.counts.values()} == {16 * FIRST}
    for step in range(1, 6):
        model.zero_grad()
        wanted = best_queries(fg.memory, dict.fromkeys(first.counts, FIRST), UNITS)
        report = fg.estimate(*batch(step))
        assert {n: int(c.sum()) for n, c in report.counts.items()} == {
            n: 16 * q for n, q in wanted.items()
        }
    assert report.queries == sum(int(c.sum()) for c in report.counts.values())
    assert report.queries != first.queries
    costs = [fg.memory[name]["outlook"]["cost"] for name in ("early", "late", "head")]
    assert costs == sorted(costs, reverse=True)  # of a query: the part of the model after it


def test_a_posterior_mean_is_shorter_than_the_gradient() -> None:
    """The weight of a group is sqrt(d) |g|, with |g|^2 the estimate's over its squared cosine."""
    model = network()
    fg = engine(model, Shaping())
    fg.estimate(*batch(0))
    assert "outlook" not in fg.memory["early"]  # its error is not held out
    model.zero_grad()
    report = fg.estimate(*batch(1))
    found = fg.memory["early"]["outlook"]
    parameters = [*model[0].parameters(), *model[1].parameters()]
    norm = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
    cosine = found["cosines"][round(float(report.counts["early"].double().mean()))]
    count = sum(p.numel() for p in parameters)
    assert found["weight"] == pytest.approx((count * norm / cosine) ** 0.5)


def test_a_pilot_and_a_floor_are_kept() -> None:
    model = network()
    estimator = LikelihoodRatio(1e-5)
    groups = [Group(module, estimator, "auto") for module in model]
    fg = ForwardGradient(model, entropy, groups, allocator=Neyman(pilot=6, min_queries=2))
    for step in range(4):
        report = fg.estimate(*batch(step))
    assert all(int(c.min()) >= 8 for c in report.counts.values())


def test_it_resumes_bit_identically() -> None:
    model = network()
    one, two = engine(model, Shaping()), engine(model, Shaping())
    for step in range(3):
        one.estimate(*batch(step))
    two.load_state_dict(one.state_dict())
    found = []
    for fg in (one, two):
        model.zero_grad()
        report = fg.estimate(*batch(3))
        found.append((flat(gradients(model)), report.queries))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_parameter_noise_may_be_automatic_if_points_have_draws_of_their_own() -> None:
    model = network()
    fg = ForwardGradient(model, entropy, Group(model, ES(1e-5), "auto", name="all"))
    for step in range(3):
        report = fg.estimate(*batch(step))
    assert float(report.counts["all"].double().mean()) > FIRST  # very noisy: more of them
    with pytest.raises(QueryError, match='queries="auto" needs draws of each point'):
        ForwardGradient(model, entropy, Group(model, MeZO(1e-5), "auto", name="all"))
    with pytest.raises(QueryError, match="queries must be a number or 'auto', not 'many'"):
        ForwardGradient(model, entropy, Group(model, ES(1e-5), "many", name="all"))  # type: ignore[arg-type]
