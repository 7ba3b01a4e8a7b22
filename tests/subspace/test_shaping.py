"""Shaped noise: the subspace is found, the fit is exact in it, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.subspace.basis import Grid
from flops.subspace.config import Shaping
from flops.subspace.measurements import FITTED
from flops.subspace.moments import Moments, leading
from tests.conftest import cosine, exact, flat, squared
from tests.statistical.helpers import assert_mean
from tests.support.planted import Planted, engine, planted, step


def known(channels: Tensor, **more: object) -> dict[str, object]:
    """Memory of a flat site of which these channel moments are known."""
    none = channels[:, :0]
    factor = {"matrix": channels, "vectors": none, "values": none[0], "trace": 0.0}
    one = {
        "matrix": torch.ones(1, 1).double(),
        "vectors": none[:1],
        "values": none[0],
        "trace": 0.0,
    }
    moments = [{"positions": one, "channels": factor}]
    return {"moments": moments, "shaped_steps": 10, "positions": [1], **more}


def test_draws_beyond_those_in_a_fit_are_held_out_residuals_too() -> None:
    """In the right subspace, the measured coordinates explain all of them."""
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(explore=0.99, outputs=False))
    fg = ForwardGradient(model, squared, Group(model.target, estimator, FITTED + 100, name="site"))
    fg.memory["site"] = known(model.reads @ model.reads.T, explained_variance=1.0)
    fg.estimate(x[:2], y[:2])
    assert fg.memory["site"]["explained_variance"] > 0.999


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_planted_subspace_is_found_and_the_estimate_becomes_exact(tokens: int) -> None:
    """Rank 3, found from the queries alone; then three shaped queries are all it takes."""
    model, x, y = planted(tokens)
    fg = engine(model, 8)
    truth = flat(exact(model, squared, x, y))
    errors = [float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(150)]
    memory = fg.memory["site"]
    assert errors[0] > 0.1  # isotropic: far off
    assert max(errors[-5:]) < 1e-5  # curvature of the loss at sigma = 1e-7
    assert memory["explained_variance"] > 0.999
    fg.model.zero_grad()
    report = fg.estimate(x, y, exact=True)
    assert report.shaping["site"].explore < 0.3  # one of four draws, rounded up
    assert report.shaping["site"].sites[0].explained_variance > 0.999
    assert report.shaping["site"].sites[0].site == "target"
    assert report.cosine["site"] > 0.9999


def test_in_the_right_subspace_the_estimate_is_exact() -> None:
    """Three unknowns and three shaped queries per point: nothing is left to chance."""
    model, x, y = planted()
    fg = engine(model, 4)
    fg.memory["site"] = known(model.reads @ model.reads.T, explained_variance=1.0)
    truth = flat(exact(model, squared, x, y))
    assert float((step(fg, x, y) - truth).norm() / truth.norm()) < 1e-5


def test_with_pairs_it_is_exact_to_rounding() -> None:
    """Pairs cancel the curvature, so that sigma may be large and rounding small."""
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-3, baseline="antithetic", shaping=Shaping(outputs=False))
    fg = ForwardGradient(model, squared, [Group(model.target, estimator, 8, name="site")])
    fg.memory["site"] = known(model.reads @ model.reads.T, explained_variance=1.0)
    truth = flat(exact(model, squared, x, y))
    assert float((step(fg, x, y) - truth).norm() / truth.norm()) < 1e-12


def test_a_learned_subspace_converges_towards_rounding() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-3, baseline="antithetic", shaping=Shaping(outputs=False))
    fg = ForwardGradient(model, squared, [Group(model.target, estimator, 16, name="site")])
    truth = flat(exact(model, squared, x, y))
    errors = [float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(220)]
    assert errors[0] > 0.1
    assert max(errors[-5:]) < 1e-7


def test_explained_variance_is_the_true_one() -> None:
    model, x, y = planted()
    fg = engine(model, 8, Shaping(explore=0.5))
    # A wrong subspace, the first four channels: what share of the gradient do they hold?
    wrong = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 8)).double()
    gradient = (2 * (model(x) - y) @ model.reads.T).detach()
    share = float(gradient[:, :4].square().sum() / gradient.square().sum())
    seen = []
    for seed in range(150):
        fg.seed = seed
        fg.memory["site"] = known(wrong)
        step(fg, x, y)
        seen.append(float(fg.memory["site"]["explained_variance"]))
    assert sum(seen) / len(seen) == pytest.approx(share, abs=0.05)


def test_explained_variance_of_a_learned_subspace_is_the_true_one() -> None:
    """Running estimate against the projection of the exact gradient on what was asked."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 10)).double()
    x, y = torch.randn(16, 6).double(), torch.randn(16, 10).double()
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(outputs=False))
    groups = [
        Group(model[0], estimator, queries=8, name="site"),
        Group(model[2], LikelihoodRatio(), queries=2),
    ]
    fg = ForwardGradient(model, squared, groups)
    for _ in range(40):
        fg.model.zero_grad()
        report = fg.estimate(x, y)
    hidden = model[0](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(squared(model[2](model[1](hidden)), y).sum(), hidden)
    grids = [Grid(0, 1, 40)]
    memory = fg.memory["site"]
    directions = leading(grids, [Moments.from_memory(memory["moments"][0], torch.float64)], 8)
    c = directions.coordinates(gradient)[:, : round(report.shaping["site"].k)]
    true = float(c.square().sum() / gradient.square().sum())
    assert 0.3 < true < 0.98
    assert memory["explained_variance"] == pytest.approx(true, abs=0.1)


@pytest.mark.parametrize("chunk", [2, 7, 1000])
@pytest.mark.bits
def test_chunk_size_does_not_matter(chunk: int) -> None:
    model, x, y = planted(3)
    whole, cut = engine(model, 6), engine(model, 6, chunk=chunk)
    for _ in range(8):
        a, b = step(whole, x, y), step(cut, x, y)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.bits
def test_resumed_run_is_bit_identical() -> None:
    model, x, y = planted(3)
    fg = engine(model, 6)
    for _ in range(6):
        step(fg, x, y)
    again = engine(model, 6, seed=5)
    again.load_state_dict(copy.deepcopy(fg.state_dict()))
    for _ in range(3):
        assert torch.equal(step(fg, x, y), step(again, x, y))


def test_the_unbiased_option_has_the_mean_of_isotropic_noise() -> None:
    """Even with a subspace that holds little of the gradient."""
    model, x, y = planted()
    truth = flat(exact(model, squared, x, y))
    wrong = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 8)).double()
    samples: dict[bool, list[Tensor]] = {True: [], False: []}
    for unbiased, found in samples.items():
        fg = engine(model, 12, Shaping(explore=0.5, unbiased=unbiased))
        for _ in range(200):
            fg.memory["site"] = known(wrong, explained_variance=0.3)
            found.append(step(fg, x, y))
    assert_mean(torch.stack(samples[True]), truth)
    with pytest.raises(AssertionError):
        assert_mean(torch.stack(samples[False]), truth)


def test_shaped_beats_isotropic_where_the_gradient_is_narrow() -> None:
    model, x, y = planted(5)
    truth = flat(exact(model, squared, x, y))
    shaped = engine(model, 8)
    plain = ForwardGradient(model, squared, [Group(model.target, LikelihoodRatio(1e-7), queries=8)])
    a = [cosine(step(shaped, x, y), truth) for _ in range(40)][-10:]
    b = [cosine(step(plain, x, y), truth) for _ in range(10)]
    assert sum(a) / 10 > 0.96
    assert sum(b) / 10 < 0.9


def test_convolutional_and_several_sites_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x))).mean((2, 3))

    model = Net().double()
    x, y = torch.randn(4, 1, 4, 4).double(), torch.randn(4, 2).double()
    estimator = LikelihoodRatio(1e-6, shaping=Shaping(outputs=False))
    fg = ForwardGradient(model, squared, [Group([model.a, model.b], estimator, queries=12)])
    truth = flat(exact(model, squared, x, y))
    found = [cosine(step(fg, x, y), truth) for _ in range(30)]
    assert sum(found[-5:]) > sum(found[:4]) * 5 / 4
    assert sum(found[-5:]) / 5 > 0.8


@pytest.mark.parametrize(
    ("batch", "queries", "least"),
    [(4, 8, 0.7), pytest.param(8, 4, 0.7, marks=pytest.mark.slow), (32, 3, 0.6)],
)
def test_small_batches_and_few_queries_learn_too(batch: int, queries: int, least: float) -> None:
    """Sampling noise of the explained variance must not be taken for a task that has moved."""
    torch.manual_seed(2)
    model = Planted(6).double()
    fg = engine(model, queries)
    found = []
    for _ in range(200):
        x, y = torch.randn(batch, 6, 4).double(), torch.randn(batch, 3).double()
        model.zero_grad()
        found.append(fg.estimate(x, y, exact=True).cosine["site"])
    assert sum(found[-40:]) / 40 > least


@pytest.mark.parametrize("targets", ["leaf", "block", "stage"])
def test_every_kind_of_target_gains(targets: str) -> None:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 2)).double()
    for module in (model[0], model[3]):
        module.requires_grad_(False)
    x, y = torch.randn(16, 5).double(), torch.randn(16, 2).double()
    means = []
    for shaping in (Shaping(), None):
        estimator = LikelihoodRatio(1e-6, targets, shaping=shaping)
        fg = ForwardGradient(model, squared, [Group(blocks, estimator, 6, name="blocks")])
        late = []
        for _ in range(40):
            model.zero_grad()
            report = fg.estimate(x, y, exact=True)
            late.append(report.cosine["blocks"])
        means.append(sum(late[-10:]) / 10)
        if shaping is not None:
            sites = report.shaping["blocks"].sites
            assert len(sites) == {"leaf": 2, "block": 2, "stage": 1}[targets]
            assert sum(s.k for s in sites) == pytest.approx(report.shaping["blocks"].k)
            assert all(0.5 < s.explained_variance <= 1 for s in sites)
    assert means[0] > means[1] + 0.02
    assert means[0] > 0.97
