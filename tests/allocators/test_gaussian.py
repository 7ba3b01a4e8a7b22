"""Gaussian: the paper's distribution, its scores, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flops.allocators import Gaussian, Signal, Traces
from flops.allocators import gaussian as gaussians
from flops.allocators.counts import feasible, objective
from tests.support.allocation import check, relative_j, signal, traces


def test_large_batches_have_no_kernel() -> None:
    most = gaussians.MOST_CORRELATED
    for size, same in ((most, False), (most + 1, True)):
        batch = signal(torch.rand(size), embeddings=torch.randn(size, 3))
        pair = [Gaussian(kernel=kernel) for kernel in (True, False)]
        true = traces(torch.rand(size))
        for allocator in pair:
            allocator.learn(batch, true)
        assert torch.equal(*(a.allocate(batch) for a in pair)) == same


def test_gaussian_starts_from_the_papers_values() -> None:
    found = Gaussian().parameters(20.0)
    expected = {"beta0": 20.0, "beta1": 10.0, "sigma": 4.0, "gamma": 1.0}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("feature", ["tanh", "standardised"])
def test_gaussian_first_sample_is_the_papers_distribution(feature: Any) -> None:
    losses = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0])
    vectors = torch.randn(5, 3)
    allocator = Gaussian(feature=feature)
    budget = 10**6  # rounding and the floor do not matter then
    batch = Signal(losses, 5 * budget, 1, 0, "g", embeddings=vectors)
    seen = torch.stack(
        [allocator.allocate(replace(batch, key=(0, s))).double() for s in range(2000)]
    )
    z = (losses - losses.mean()) / losses.std(correction=0)
    mu = 1 + 0.5 * torch.tanh(losses if feature == "tanh" else z)
    cosine = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=2)
    sigma = 0.04 * (torch.exp(-(1 - cosine) / 2) + gaussians.JITTER * torch.eye(5))
    raw = torch.distributions.MultivariateNormal(mu.double(), sigma.double())
    expected = raw.sample((100_000,)).clamp(min=0)
    expected = 5 * expected / expected.sum(1, keepdim=True)
    seen = seen / budget
    error = 5 * seen.std(0) / len(seen) ** 0.5
    assert ((seen.mean(0) - expected.mean(0)).abs() < error).all()
    torch.testing.assert_close(seen.T.cov(), expected.T.cov(), atol=2e-3, rtol=0.15)


@pytest.mark.parametrize("kernel", [True, False])
def test_gaussian_scores_are_those_of_autograd(kernel: bool) -> None:
    size, samples = 7, 6
    rng = np.random.default_rng(0)
    allocator = Gaussian(kernel=kernel)
    theta = np.array([0.9, 0.4, np.log(0.3), -0.4])
    allocator._learned = gaussians._GaussianState(theta=theta)
    batch = signal(rng.random(size) * 2, embeddings=torch.from_numpy(rng.normal(size=(size, 3))))
    phi = np.stack([np.ones(size), np.tanh(batch.losses.numpy())], axis=1)
    distance = allocator._distance(batch)
    root, whitened = gaussians._factor(distance, theta[3], phi)
    eps = rng.standard_normal((samples, size))
    raw = torch.from_numpy(allocator._raw(phi, eps if root is None else eps @ root.T))
    found = allocator._scores(eps, whitened, root, distance)

    t = torch.from_numpy(theta).requires_grad_()
    eye = torch.eye(size, dtype=torch.float64)
    covariance = eye * t[2].exp().square()
    if distance is not None:
        correlation = torch.exp(-torch.from_numpy(distance) / (2 * t[3].exp().square()))
        covariance = t[2].exp().square() * (correlation + gaussians.JITTER * eye)
    density = torch.distributions.MultivariateNormal(torch.from_numpy(phi) @ t[:2], covariance)
    expected = [
        torch.autograd.grad(density.log_prob(row), t, retain_graph=True)[0].numpy() for row in raw
    ]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-8, atol=1e-8)
    assert (found[:, 3] != 0).all() == kernel


def test_gaussian_update_follows_the_score_gradient() -> None:
    """Against the derivative of the mean cost by finite differences with common samples."""
    losses = torch.linspace(0, 2, 12).double()
    true = (0.2 + losses).square()
    batch = signal(losses, 20, embeddings=torch.randn(12, 4))
    allocator = Gaussian(samples=40_000)
    caught: list[np.ndarray] = []
    allocator._update = lambda gradient, *rest: caught.append(gradient)  # type: ignore[method-assign]
    allocator.fit(batch, traces(true), 1)

    eps = np.random.default_rng(1).standard_normal((40_000, 12))
    eps = np.concatenate([eps, -eps])
    phi = np.stack([np.ones(12), np.tanh(losses.numpy())], axis=1)
    distance = allocator._distance(batch)
    assert distance is not None

    def cost(theta: np.ndarray) -> float:
        root = np.linalg.cholesky(gaussians._kernel(distance, theta[3]))
        raw = phi @ theta[:2] + np.exp(theta[2]) * eps @ root.T
        counts = feasible(raw, float(batch.budget), 1.0)
        return float(np.log(objective(true.numpy(), counts)).mean())

    start = gaussians._GaussianState().theta
    steps = 1e-3 * np.eye(4)
    expected = np.array([(cost(start + d) - cost(start - d)) / 2e-3 for d in steps])
    np.testing.assert_allclose(caught[0], expected, atol=0.1 * np.abs(expected).max())
    assert np.abs(expected[1]) > 0.05


LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda losses: losses.square() + 1e-3,
    "linear": lambda losses: losses + 0.01,
    "falling": lambda losses: torch.exp(-2 * losses),
    "equal": torch.ones_like,
}


def example(step: int, law: str, size: int = 48) -> tuple[Signal, Traces]:
    source = torch.Generator().manual_seed(step)
    losses = (2.5 * torch.rand(size, generator=source, dtype=torch.float64)).square() / 2
    vectors = torch.randn(size, 6, generator=source)
    batch = signal(losses, 20, embeddings=vectors, key=(0, step, 0))
    return batch, traces(LAWS[law](losses), 20)


def mean_j(counts_of: Callable[[Signal], Any], law: str) -> float:
    batches = [example(step, law) for step in range(9000, 9008)]
    return float(np.mean([relative_j(counts_of(b), t.values) for b, t in batches]))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("feature", ["tanh", "standardised"])
@pytest.mark.parametrize("kernel", [True, False])
def test_gaussian_finds_the_best_of_its_family(feature: Any, kernel: bool, law: str) -> None:
    allocator = Gaussian(feature=feature, kernel=kernel)
    assert not allocator.converged
    for step in range(100):
        allocator.learn(*example(step, law))
    assert allocator.converged

    def grid(angle: float) -> float:
        c, s = np.cos(angle), np.sin(angle)
        return mean_j(lambda b: feasible(c + s * allocator._feature(b), float(b.budget), 1.0), law)

    best = min(grid(angle) for angle in np.linspace(-1.5, 3.0, 40))
    found = mean_j(allocator.allocate, law)
    assert found < 1.03 * best
    if law == "equal":
        assert found < 1.02
    else:
        assert best < 0.9  # else equal counts would pass


def test_gaussian_interval_and_iterations() -> None:
    allocator = Gaussian(interval=3, iterations=4)
    updates = []
    for step in range(7):
        allocator.learn(*example(step, "square"))
        updates.append(allocator._learned.updates)
    assert updates == [4, 4, 4, 8, 8, 8, 12]


def test_gaussian_makes_two_updates_once_converged() -> None:
    allocator = Gaussian()
    for step in range(100):
        allocator.learn(*example(step, "linear"))
    assert allocator.converged
    before = allocator._learned.updates
    allocator.learn(*example(100, "linear"))
    assert allocator._learned.updates == before + 2


def test_gaussian_without_a_floor_does_not_learn_to_drop_points() -> None:
    """A dropped point adds nothing to J; were that believed, all would be dropped."""
    allocator = Gaussian(min_queries=0)
    dropped = []
    for step in range(60):
        batch, true = example(step, "square")
        batch = replace(batch, minimum=0)
        counts = allocator.allocate(batch)
        check(counts, batch)
        dropped.append(int((counts == 0).sum()))
        seen = counts > 0
        allocator.learn(batch, traces(true.values * seen, counts))
    assert sum(dropped) > 0
    batch, true = example(99, "square")
    counts = allocator.allocate(replace(batch, minimum=0))
    hard = true.values > true.values.median()
    assert (counts[hard] > 0).all()
    assert counts[hard].double().mean() > counts[~hard].double().mean()


def test_gaussian_points_without_draws_teach_nothing() -> None:
    """A point that was not asked has no trace, which is not a trace of zero."""
    batch, true = example(0, "square")
    part = torch.arange(0, 48, 2)
    some = traces(true.values.clone(), torch.tensor([20, 0]).repeat(24))
    some.values[1::2] = 0
    alone, among = Gaussian(kernel=False), Gaussian(kernel=False)
    among.learn(batch, some)
    alone.learn(replace(batch.at(part), budget=batch.budget // 2), true.at(part))
    np.testing.assert_array_equal(among._learned.theta, alone._learned.theta)


def test_gaussian_kernel_makes_like_points_alike() -> None:
    vectors = torch.eye(4).repeat_interleave(10, 0)  # four kinds of points
    batch = signal(torch.full((40,), 0.5), 1000, embeddings=vectors)
    seen = torch.stack([Gaussian().allocate(replace(batch, key=(s,))).double() for s in range(300)])
    correlation = torch.corrcoef(seen.T)
    same = torch.block_diag(*[torch.ones(10, 10)] * 4).bool()
    assert correlation[same].mean() > 0.9
    assert correlation[~same].mean() < 0.1


def test_gaussian_costs_are_relative_to_the_least_j() -> None:
    """By theorem 2 no counts have less than 0; those of the mean have little more."""
    losses = torch.rand(32).double() + 0.1
    for mean in (4, 400):
        allocator = Gaussian(kernel=False)
        for step in range(20):
            allocator.learn(signal(losses, mean, key=(0, step, 0)), traces(losses.square()))
        learned = allocator._learned
        assert 0 < learned.fast < 0.5
        assert 0 < learned.slow < 0.5


def test_gaussian_shows_its_options_only() -> None:
    allocator = Gaussian(pilot=2)
    assert "pilot=2" in repr(allocator)
    assert "theta" not in repr(allocator)


def test_gaussian_gamma_moves_only_when_its_score_is_computed() -> None:
    """Once in ten updates; in between the factor in use must stay that of its value."""
    losses = torch.rand(12).double() + 0.1
    batch = signal(losses, embeddings=torch.randn(12, 3).double())
    gammas, start = {}, Gaussian().parameters(1)["gamma"]
    for updates in (1, 10, 11):
        allocator = Gaussian()
        allocator.fit(batch, traces(losses.square()), updates)
        gammas[updates] = allocator.parameters(1)["gamma"]
    assert gammas[1] == gammas[10] != start
    assert gammas[11] != gammas[10]
    diagonal = Gaussian(kernel=False)
    diagonal.fit(batch, traces(losses.square()), 11)
    assert diagonal.parameters(1)["gamma"] == start


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_gaussian_one_bad_embedding_leaves_the_others_their_distances(bad: float) -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 3))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = 1 - unit @ unit.T
    vectors[2, 1] = bad
    found = gaussians._cosine_distance(vectors)
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(
        found[np.ix_(others, others)], expected[np.ix_(others, others)], atol=1e-12
    )
    assert found[2, 2] == 0
    assert (found[2, others] == 1).all()
