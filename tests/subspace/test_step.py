"""Single steps of shaped noise: many and few queries, dead losses, scales, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, diagnose
from flops.allocators import Gaussian
from flops.subspace.config import Shaping
from flops.subspace.measurements import FITTED
from flops.subspace.moments import DENSE
from flops.subspace.regression import decay
from tests.conftest import cosine, exact, flat, squared
from tests.support.noise import noise
from tests.support.planted import Planted, engine, planted, step

KEEP = 0.98  # decay of the moments


def test_more_queries_than_directions_leave_nothing_to_chance() -> None:
    model, x, y = planted()
    fg = engine(model, 40)
    truth = flat(exact(model, squared, x, y))
    for _ in range(6):
        found = step(fg, x, y)
    assert float((found - truth).norm() / truth.norm()) < 1e-5


def test_very_many_queries_of_a_point_stay_cheap() -> None:
    """Only so many are fitted; the others are averaged all the same."""
    model, x, y = planted()
    x, y, n = x[:2], y[:2], FITTED + 80
    truth = flat(exact(model, squared, x, y))
    gradient = (2 * (model(x) - y) @ model.reads.T).detach()
    fg = engine(model, n)
    step(fg, x, y)
    moment, delta = torch.zeros(12, 12).double(), torch.zeros(2, 12).double()
    for j in range(2):  # an isotropic step, by hand
        z = noise("gaussian", (0, 0, 0, j), n, 12)
        w = z @ gradient[j]
        delta[j] = w @ z / n
        energy = w.square().mean()
        outer = torch.outer(delta[j], delta[j]) - energy / n * torch.eye(12).double()
        moment += n**2 / energy * n / (n + 1) * outer
    torch.testing.assert_close(model.target.bias.grad, delta.mean(0), rtol=1e-5, atol=1e-5)
    found = fg.memory["site"]["moments"][0]["channels"]["matrix"]
    torch.testing.assert_close(found, moment, rtol=1e-5, atol=1e-5 * float(moment.abs().max()))
    for _ in range(5):
        last = step(fg, x, y)
    assert float((last - truth).norm() / truth.norm()) < 1e-5


def test_diagnose_shows_shaped_sites() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-6, shaping=Shaping(outputs=False))
    groups = [Group(model.target, estimator, queries=8, name="site")]
    found = diagnose(model, squared, x, y, groups=groups, repeats=3, sigmas=())
    (row,) = found.shaping
    assert (row.group, row.site) == ("site", "target")
    assert row.explained_variance > 0.9
    assert row.cosine > 0.98
    assert found.to_dict()["shaping"][0]["k"] == row.k
    # From an engine in its isotropic steps: nothing is known yet.
    fg = ForwardGradient(model, squared, groups)
    fg.estimate(x, y)
    (early,) = diagnose(
        model, squared, x, y, groups=groups, repeats=3, sigmas=(), state=fg.state_dict()
    ).shaping
    assert early.k == 0
    assert early.cosine < row.cosine


@pytest.mark.parametrize("queries", [2, 3])
def test_few_queries_are_shaped_too(queries: int) -> None:
    model, x, y = planted()
    fg = engine(model, queries)
    for _ in range(8):
        fg.model.zero_grad()
        report = fg.estimate(x, y)
    assert report.shaping["site"].k >= 1


def test_no_more_directions_are_asked_than_a_sketch_has() -> None:
    model = nn.Sequential(nn.Linear(2, DENSE + 1), nn.Linear(DENSE + 1, 1)).double()
    model[1].requires_grad_(False)
    estimator = LikelihoodRatio(1e-6, shaping=Shaping(explore=0.1))
    fg = ForwardGradient(model, squared, [Group(model[0], estimator, 200, name="site")])
    x, y = torch.randn(2, 2).double(), torch.randn(2, 1).double()
    for _ in range(5):
        report = fg.estimate(x, y)
    assert report.shaping["site"].k <= 128


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_a_loss_that_is_dead_for_a_while_changes_nothing() -> None:
    class Dead(Planted):
        alive = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alive

    model = Dead().double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    fg = engine(model, 8)
    model.alive = 0.0
    fg.estimate(x, y)  # from the start
    model.alive = 1.0
    for _ in range(10):
        fg.estimate(x, y)
    before = copy.deepcopy(fg.memory["site"])
    model.alive = 0.0
    for _ in range(10):
        fg.estimate(x, y)
    after = fg.memory["site"]
    assert after["explained_variance"] == pytest.approx(before["explained_variance"])
    a, b = (m["moments"][0]["channels"]["matrix"] for m in (before, after))
    torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    """In float32: what counts as rounding goes by the loss."""
    torch.manual_seed(0)
    model = Planted(5)
    x, y = torch.randn(6, 5, 4), torch.randn(6, 3)
    estimator = LikelihoodRatio(1e-2, shaping=Shaping())
    groups = [Group(model.target, estimator, queries=8, name="site")]
    fg = ForwardGradient(model, lambda out, y: scale * squared(out, y), groups)
    found = [fg.estimate(x, y, exact=True).cosine["site"] for _ in range(20)]
    assert sum(found[-5:]) / 5 > 0.9


def test_one_dead_point_does_not_stop_the_search_for_a_ridge() -> None:
    torch.manual_seed(0)
    model = Planted(5)
    x, y = torch.randn(6, 5, 4), torch.randn(6, 3)
    weight = torch.tensor([0.0, 1, 1, 1, 1, 1])
    fg = ForwardGradient(
        model,
        lambda out, y: squared(out, y[:, :3]) * y[:, 3],
        [
            Group(
                model.target, LikelihoodRatio(1e-2, shaping=Shaping(outputs=False)), 8, name="site"
            )
        ],
    )
    found = set()
    for _ in range(20):
        fg.estimate(x, torch.cat([y, weight.unsqueeze(1)], 1))
        found.add(fg.memory["site"].get("ridge", 1.0))
    assert len(found) > 1


def test_with_a_pilot_the_report_is_of_the_later_queries() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-7, shaping=Shaping())
    groups = [Group(model.target, estimator, queries=10, name="site")]
    fg = ForwardGradient(model, squared, groups, allocator=Gaussian(pilot=2))
    for _ in range(8):
        report = fg.estimate(x, y)
    assert report.shaping["site"].k > 2


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": "none", "shaping": Shaping()},
        {"noise": "orthogonal", "shaping": Shaping(unbiased=True)},
    ],
)
def test_combinations_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shaping"):
        LikelihoodRatio(**options)


def test_a_state_of_another_precision_is_converted() -> None:
    model, x, y = planted(3)
    fg = engine(model, 6)
    for _ in range(6):
        step(fg, x, y)
    single = copy.deepcopy(model).float()
    estimator = LikelihoodRatio(1e-3, shaping=Shaping())
    other = ForwardGradient(single, squared, [Group(single.target, estimator, 6, name="site")])
    other.load_state_dict(fg.state_dict())
    other.estimate(x.float(), y.float())
    assert other.memory["site"]["moments"][0]["channels"]["matrix"].dtype == torch.float32


def test_the_prior_alone_helps_isotropic_queries() -> None:
    model, x, y = planted(5)
    truth = flat(exact(model, squared, x, y))
    prior = engine(model, 8, Shaping(explore=1.0))
    plain = ForwardGradient(model, squared, [Group(model.target, LikelihoodRatio(1e-7), queries=8)])
    a = [cosine(step(prior, x, y), truth) for _ in range(60)][-10:]
    b = [cosine(step(plain, x, y), truth) for _ in range(10)]
    assert prior.memory["site"]["explained_variance"] == 0
    assert sum(a) / 10 > sum(b) / 10 + 0.05


@pytest.mark.parametrize(
    ("now", "spread", "run", "best", "expected"),
    [
        (0.5, 0.0, 0.5, 0.5, (KEEP, 0.5)),
        (0.6, 0.0, 0.6, 0.5, (KEEP * 0.8**2, 0.6)),  # (1 - 0.6) / (1 - 0.5)
        (0.07, 0.0, 0.4, 0.5, (KEEP * 0.2, 0.4)),  # 0.07 over 0.7 of the best
        (0.07, 0.02, 0.4, 0.5, (KEEP * 0.15 / 0.35, 0.4)),  # four standard errors
        (-0.5, 0.1, 0.4, 0.5, (0.0, 0.4)),
        (0.9, 0.0, 1.0, 1.0, (KEEP, 1.0)),
        (0.2, 0.0, 0.2, 0.0, (KEEP * 0.8**2, 0.2)),
        (-0.2, 0.0, -0.2, 0.0, (KEEP, 0.0)),
    ],
)
def test_decay_written_out(
    now: float, spread: float, run: float, best: float, expected: tuple[float, float]
) -> None:
    assert decay(Shaping(), now, spread, run, best) == pytest.approx(expected, rel=1e-9)
    assert decay(Shaping(decay=0.3), now, spread, run, best) == (0.3, best)
