"""Shaped noise: the subspace is found, the fit is exact in it, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.estimators.shaped import explore_share
from flops.posterior import posterior
from flops.shaping import Grid, Moments, Shaping, choose
from tests.conftest import cosine, exact, flat, gradients, squared
from tests.statistical.helpers import assert_mean


class Planted(nn.Module):
    """A site of 12 channels of which the loss reads three combinations."""

    def __init__(self, tokens: int = 1) -> None:
        super().__init__()
        self.target = nn.Linear(4, 12)
        self.register_buffer("reads", torch.randn(12, 3))
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        out = self.target(x) @ self.reads  # (B, [T,] 3)
        return out if self.tokens == 1 else out[:, 0]  # as with a classification token


def planted(tokens: int = 1) -> tuple[Planted, Tensor, Tensor]:
    x = torch.randn(6, 4) if tokens == 1 else torch.randn(6, tokens, 4)
    return Planted(tokens).double(), x.double(), torch.randn(6, 3).double()


def engine(model: nn.Module, queries: int, shaping: Shaping | None = None, **options):
    estimator = LikelihoodRatio(1e-7, shaping=shaping or Shaping())
    groups = [Group(model.target, estimator, queries=queries, name="site")]
    return ForwardGradient(model, squared, groups, **options)


def step(fg: ForwardGradient, x: Tensor, y: Tensor) -> Tensor:
    fg.model.zero_grad()
    fg.estimate(x, y)
    return flat(gradients(fg.model))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_planted_subspace_is_found(tokens: int) -> None:
    model, x, y = planted(tokens)
    fg = engine(model, 24)
    truth = flat(exact(model, squared, x, y))
    errors = [float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(60)]
    memory = fg.memory["site"]
    assert 3 <= memory["k"] <= 8
    assert errors[0] > 0.1  # isotropic: far off
    assert max(errors[-5:]) < 0.01
    assert memory["captured"] > 0.99
    assert memory["explore"] < 0.2


def test_in_the_right_subspace_the_estimate_is_exact() -> None:
    """Three unknowns and six shaped queries per point: nothing is left to chance."""
    model, x, y = planted()
    fg = engine(model, 8)
    fg.memory["site"] = {
        "moments": [(torch.ones(1, 1).double(), model.reads @ model.reads.T)],
        "shaped_steps": 10,
        "captured": 1.0,
        "rounding": 1e-9,
    }
    truth = flat(exact(model, squared, x, y))
    assert float((step(fg, x, y) - truth).norm() / truth.norm()) < 1e-5


def test_captured_energy_is_the_true_one() -> None:
    model, x, y = planted()
    fg = engine(model, 8, Shaping(explore=0.5))
    for _ in range(8):
        step(fg, x, y)
    # A wrong subspace: the first four channels. What share of the gradient do they hold?
    wrong = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 8)).double()
    residual = model(x) - y
    gradient = (2 * residual @ model.reads.T).detach()
    share = gradient[:, :4].square().sum(1) / gradient.square().sum(1)
    seen = []
    for seed in range(150):
        fg.seed = seed
        kept = {**fg.memory["site"], "moments": [(torch.ones(1, 1).double(), wrong)]}
        fg.memory["site"] = {**kept, "captured": float(share.mean()), "shaped_steps": 10}
        step(fg, x, y)
        before, after = float(share.mean()), float(fg.memory["site"]["captured"])
        seen.append((after - 0.9 * before) / 0.1)  # undo the running average
    assert sum(seen) / len(seen) == pytest.approx(float(share.mean()), abs=0.12)


@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_chunk_size_does_not_matter(chunk: int) -> None:
    model, x, y = planted(3)
    whole, cut = engine(model, 6), engine(model, 6, chunk=chunk)
    for _ in range(8):
        a, b = step(whole, x, y), step(cut, x, y)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


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
            fg.memory["site"] = {
                "moments": [(torch.ones(1, 1).double(), wrong)],
                "shaped_steps": 10,
                "captured": 0.3,
            }
            found.append(step(fg, x, y))
    assert_mean(torch.stack(samples[True]), truth)
    with pytest.raises(AssertionError):
        assert_mean(torch.stack(samples[False]), truth)


def test_posterior_and_leave_one_out_by_brute_force() -> None:
    size, k = 7, 3
    e, w = torch.randn(1, size, k).double(), torch.randn(1, size).double()
    noise, prior = torch.rand(1, size).double() + 0.1, torch.tensor([0.5, 0.3, 0.1]).double()
    real = torch.ones(1, size, dtype=torch.bool)
    iso = torch.arange(size).unsqueeze(0) < 3
    fit = posterior(e, w, noise, real, iso, prior)

    def solve(rows: list[int]) -> tuple[Tensor, Tensor]:
        a = e[0, rows]
        precision = torch.diag(1 / prior) + (a / noise[0, rows].unsqueeze(1)).T @ a
        covariance = torch.linalg.inv(precision)
        return covariance @ (a / noise[0, rows].unsqueeze(1)).T @ w[0, rows], covariance

    mean, covariance = solve(list(range(size)))
    torch.testing.assert_close(fit.mean[0], mean)
    torch.testing.assert_close(fit.covariance[0], covariance.diagonal())
    without = []
    for i in range(size):
        rest, doubt = solve([j for j in range(size) if j != i])
        without.append(rest)
        torch.testing.assert_close(fit.held_out[0, i], w[0, i] - e[0, i] @ rest)
        torch.testing.assert_close(fit.doubt[0, i], e[0, i] @ doubt @ e[0, i])
    torch.testing.assert_close(fit.left_out[0], torch.stack(without[:3]).mean(0))


def test_padding_changes_nothing() -> None:
    e, w = torch.randn(1, 4, 2).double(), torch.randn(1, 4).double()
    noise, prior = torch.full((1, 4), 0.1).double(), torch.tensor([0.6, 0.4]).double()
    iso = torch.tensor([[True, True, False, False]])
    plain = posterior(e, w, noise, torch.ones_like(iso), iso, prior)
    pad = lambda t: torch.cat([t, torch.zeros_like(t[:, :2])], 1)  # noqa: E731
    padded = posterior(pad(e), pad(w), pad(noise), pad(torch.ones_like(iso)), pad(iso), prior)
    torch.testing.assert_close(padded.mean, plain.mean)
    torch.testing.assert_close(padded.energy, plain.energy)
    torch.testing.assert_close(padded.held_out[:, :4], plain.held_out)


@pytest.mark.parametrize("channels_first", [True, False])
def test_lift_and_coordinates_are_adjoint(channels_first: bool) -> None:
    grids = [Grid(0, 3, 4, channels_first), Grid(12, 1, 5, False)]
    moments = []
    for g in grids:
        p, c = (torch.randn(n, n).double() for n in (g.positions, g.channels))
        moments.append(Moments(p @ p.T, c @ c.T))
    subspace = choose(grids, moments, asked=6)
    c, z = torch.randn(2, subspace.size).double(), torch.randn(2, 17).double()
    torch.testing.assert_close(subspace.coordinates(subspace.lift(c)), c)  # orthonormal
    left, right = (subspace.lift(c) * z).sum(1), (c * subspace.coordinates(z)).sum(1)
    torch.testing.assert_close(left, right)
    assert float(subspace.prior.sum()) <= 1


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
    estimator = LikelihoodRatio(1e-6, shaping=Shaping())
    fg = ForwardGradient(model, squared, [Group([model.a, model.b], estimator, queries=12)])
    truth = flat(exact(model, squared, x, y))
    found = [cosine(step(fg, x, y), truth) for _ in range(30)]
    assert sum(found[-5:]) > sum(found[:4]) * 5 / 4
    assert sum(found[-5:]) / 5 > 0.8


def test_exploration_falls_as_the_captured_energy_rises() -> None:
    shares = [explore_share(Shaping(), captured) for captured in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0]
    assert explore_share(Shaping(explore=0.4), 0.9) == 0.4


@pytest.mark.parametrize("options", [{"explore": 0.0}, {"explore": 1.5}, {"decay": 1.0}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        Shaping(**options)
