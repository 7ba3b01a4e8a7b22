"""Updates of the Gaussian allocator written out: samples, scores, Adam, and how often."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flops.allocators import Gaussian
from flops.allocators.counts import feasible, objective
from flops.allocators.gaussian import _GaussianState
from flops.perturb.random import mix
from tests.support.allocation import signal, traces

JITTER = 1e-3
LEAST_RATE, SETTLING = 0.05, 50  # of Adam
LOG_SIGMA, LOG_GAMMA = (np.log(0.03), 0.0), (-2.0, 2.0)
SETTLED = 100  # updates
LOSSES = torch.linspace(0.1, 2, 6).double()
TRACES = (0.2 + LOSSES).square()


class Written:
    """The four parameters and Adam's averages."""

    def __init__(self, rate: float = 0.1) -> None:
        self.theta = np.array([1.0, 0.5, np.log(0.2), 0.0])
        self.mean, self.square = np.zeros(4), np.zeros(4)
        self.updates, self.rate = 0, rate
        self.fast = self.slow = 0.0

    def update(self, gradient: np.ndarray, moved: list[bool], phi: np.ndarray, cost: float) -> None:
        size = np.array([1.0, max(1e-6, np.sqrt((phi[:, 1] ** 2).mean())), 1.0, 1.0])
        rate = self.rate * max(LEAST_RATE, 1 / (1 + self.updates / SETTLING))
        self.updates += 1
        for i in range(4):
            if moved[i]:
                g = gradient[i] / size[i]
                self.mean[i] = 0.9 * self.mean[i] + 0.1 * g
                self.square[i] = 0.99 * self.square[i] + 0.01 * g**2
                m = self.mean[i] / (1 - 0.9**self.updates)
                s = self.square[i] / (1 - 0.99**self.updates)
                self.theta[i] -= rate * m / (np.sqrt(s) + 1e-12) / size[i]
        middle = (phi @ self.theta[:2]).mean()
        if middle > 0.05:
            self.theta[:2] /= middle
            self.theta[2] -= np.log(middle)
        self.theta[2] = min(max(self.theta[2], LOG_SIGMA[0]), LOG_SIGMA[1])
        self.theta[3] = min(max(self.theta[3], LOG_GAMMA[0]), LOG_GAMMA[1])
        if self.updates == 1:
            self.fast = self.slow = cost
        else:
            self.fast = 0.9 * self.fast + 0.1 * cost
            self.slow = 0.98 * self.slow + 0.02 * cost

    def check(self, found: Gaussian) -> None:
        learned = found._learned
        np.testing.assert_allclose(learned.theta, self.theta, rtol=1e-8)
        np.testing.assert_allclose(learned.mean, self.mean, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(learned.square, self.square, rtol=1e-8, atol=1e-12)
        assert learned.updates == self.updates
        assert (learned.fast, learned.slow) == pytest.approx((self.fast, self.slow))


@pytest.mark.parametrize("rate", [0.1, 3.0])
def test_adam(rate: float) -> None:
    """Large steps, so that all bounds are met."""
    rng = np.random.default_rng(0)
    found, written = Gaussian(learning_rate=rate), Written(rate)
    lows, highs = np.full(4, np.inf), np.full(4, -np.inf)
    for step in range(300):
        phi = np.stack([np.ones(5), rng.uniform(0, 0.3, 5)], axis=1)
        gradient, moved = rng.normal(0, 1, 4), [True, True, True, step % 10 == 0]
        gradient[2:] += np.sign(np.sin(step / 20))
        cost = float(rng.uniform())
        found._update(gradient, np.array(moved), phi, cost)
        written.update(gradient, moved, phi, cost)
        written.check(found)
        lows, highs = np.minimum(lows, written.theta), np.maximum(highs, written.theta)
    if rate == 3:
        assert (lows[2], highs[2]) == pytest.approx(LOG_SIGMA)
        assert (lows[3], highs[3]) == pytest.approx(LOG_GAMMA)


def test_averages_of_the_cost() -> None:
    found, phi = Gaussian(), np.ones((3, 2))
    for cost in (4.0, 2.0, 1.0):
        found._update(np.zeros(4), np.array([True] * 4), phi, cost)
    assert found._learned.fast == pytest.approx(0.9 * (0.9 * 4 + 0.1 * 2) + 0.1)
    assert found._learned.slow == pytest.approx(0.98 * (0.98 * 4 + 0.02 * 2) + 0.02)


def test_a_small_mean_is_not_scaled_up() -> None:
    """Of 0.05 and less, where beta would jump."""
    for middle, scaled in ((0.04, False), (0.06, True)):
        found = Gaussian(learning_rate=1e-12)
        theta = np.array([middle, 0.0, np.log(0.2), 0.0])
        found._learned = _GaussianState(theta=theta)
        found._update(np.ones(4), np.array([True] * 4), np.ones((3, 2)), 0.0)
        assert found._learned.theta[0] == pytest.approx(1.0 if scaled else middle, rel=1e-6)
        sigma = np.clip(np.log(0.2) - np.log(middle) * scaled, *LOG_SIGMA)
        assert found._learned.theta[2] == pytest.approx(sigma)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("minimum", [0, 1, 3])
def test_a_fit(kernel: bool, minimum: int) -> None:
    """Twelve updates on one batch; the kernel is factorised in the first and the eleventh."""
    vectors = torch.randn(6, 4).double()
    batch = signal(LOSSES, 8, minimum=minimum, embeddings=vectors, key=(3, 4, 5))
    found, written = Gaussian(kernel=kernel, samples=8), Written()
    found.fit(batch, traces(TRACES), 12)
    rng = np.random.default_rng(mix(3, 4, 5, 2))
    values = TRACES.numpy() / float(TRACES.max())
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    distance = (1 - unit @ unit.T).numpy()
    np.fill_diagonal(distance, 0)
    phi = np.stack([np.ones(6), np.tanh(LOSSES.numpy())], axis=1)
    ideal = np.sqrt(values).sum() ** 2 / batch.budget
    root = np.eye(6)
    for i in range(12):
        renew = i % 10 == 0
        _, _, log_sigma, log_gamma = written.theta
        scale = np.exp(2 * log_gamma)
        smooth = np.exp(-distance / (2 * scale))
        if renew and kernel:
            root = np.linalg.cholesky(smooth + JITTER * np.eye(6))
        inverse = np.linalg.inv(root)
        eps = rng.standard_normal((4, 6))
        eps = np.concatenate([eps, -eps])
        scores, costs = np.zeros((8, 4)), np.zeros(8)
        for k, e in enumerate(eps):
            raw = phi @ written.theta[:2] + np.exp(log_sigma) * root @ e
            counts = feasible(raw, float(batch.budget), float(max(1, minimum)))
            costs[k] = np.log(objective(values, counts) / ideal)
            v = inverse.T @ e
            scores[k, :2] = phi.T @ v / np.exp(log_sigma)
            scores[k, 2] = e @ e - 6
            if renew and kernel:
                derivative = smooth * distance / scale
                trace = np.trace(inverse @ derivative @ inverse.T)
                scores[k, 3] = (v @ derivative @ v - trace) / 2
        gradient = ((costs - costs.mean())[:, None] * scores).mean(axis=0)
        written.update(gradient, [True, True, True, renew and kernel], phi, costs.mean())
    written.check(found)


def test_nothing_is_learned_of_points_that_look_equal() -> None:
    for batch, seen in (
        (signal(LOSSES), traces(torch.zeros(6))),
        (signal(LOSSES[:1]), traces(TRACES[:1])),
        (signal(LOSSES), traces(TRACES, [0] * 5 + [2])),
    ):
        found = Gaussian(kernel=False)
        found.fit(batch, seen, 3)
        assert found._learned.updates == 0
    found = Gaussian(kernel=False)
    found.fit(signal(LOSSES[:2]), traces(TRACES[:2]), 3)
    assert found._learned.updates == 3


@pytest.mark.parametrize(
    ("updates", "apart", "iterations", "made"),
    [
        (SETTLED - 1, 0.0, 10, 10),
        (SETTLED, 0.0, 10, 2),  # converged
        (SETTLED, 0.0099, 10, 2),
        (SETTLED, 0.0101, 10, 3),  # a third of them
        (SETTLED, 0.5, 30, 10),
        (SETTLED, 0.5, 3, 2),
    ],
)
def test_how_many_updates(updates: int, apart: float, iterations: int, made: int) -> None:
    found = Gaussian(kernel=False, iterations=iterations)
    found._learned = _GaussianState(updates=updates, fast=0.3 + apart, slow=0.3)
    assert found.converged == (updates >= SETTLED and apart < 0.01)
    found.learn(signal(LOSSES), traces(TRACES))
    assert found._learned.updates == updates + made
    assert found._learned.calls == 1


def test_parameters_are_in_queries() -> None:
    found = Gaussian()
    found._learned = _GaussianState(theta=np.array([0.5, 2.0, np.log(0.3), np.log(3.0)]))
    shown = found.parameters(10)
    assert shown == pytest.approx({"beta0": 5, "beta1": 20, "sigma": 3, "gamma": 3})
    batch = signal([0.0, 1.0], 10)
    shares = np.array([0.5, 0.5 + 2 * np.tanh(1)])
    np.testing.assert_allclose(found.mean_counts(batch), 20 * shares / shares.sum())


def test_standardised_losses() -> None:
    """Equal ones, also up to rounding, are all 0."""
    found = Gaussian("standardised")
    losses = torch.tensor([1.0, 2.0, 6.0]).double()
    z = (losses - 3) / losses.std(correction=0)
    np.testing.assert_allclose(found._feature(signal(losses)), torch.tanh(z))
    alike = torch.tensor([1.0, 1.0 + 4e-13, 1.0], dtype=torch.double)
    np.testing.assert_allclose(found._feature(signal(alike)), 0, atol=1e-12)
    apart = torch.tensor([1.0, 1.0 + 1e-11, 1.0], dtype=torch.double)
    assert np.abs(found._feature(signal(apart))).max() > 0.5


def test_distances_need_a_kernel_and_embeddings_of_few_points() -> None:
    batch = signal(LOSSES, embeddings=torch.eye(6))
    found = Gaussian()._distance(batch)
    np.testing.assert_allclose(found, 1 - np.eye(6))
    assert Gaussian(kernel=False)._distance(batch) is None
    assert Gaussian()._distance(replace(batch, embeddings=None)) is None


def test_a_state_is_all_that_was_learned() -> None:
    found, other = Gaussian(kernel=False), Gaussian(kernel=False)
    found.learn(signal(LOSSES), traces(TRACES))
    state = found.state_dict()
    other.load_state_dict(state)
    for name, value in vars(found._learned).items():
        np.testing.assert_array_equal(getattr(other._learned, name), value)
    found._learned.theta[0] = 99  # neither shares memory with the state
    assert float(state["theta"][0]) != 99
