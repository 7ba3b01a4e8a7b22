"""Neyman's regression written out: log traces, weights, spread, and what is kept of a point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import digamma, polygamma

from flops.allocators import Neyman, Signal, Traces
from flops.allocators.neyman import measure
from tests.support.allocation import sampled, signal, traces

DECAY, FORGET = 0.9, 0.7  # of all statistics in a step, of a point's until its next visit
LEAST_SPREAD, MOST_SPREAD = 0.02, 10.0
OUTLIER = 30.0  # distance to the median
RIDGE, INTERCEPT = 1e-3, 1e-6


def features(losses: np.ndarray, scale: float) -> np.ndarray:
    z = np.arcsinh(losses / scale) / 5
    return np.stack([np.ones_like(z), z, z**2], axis=1)


class Written:
    """The regression in plain sums, of points that all have a valid trace."""

    def __init__(self) -> None:
        self.scale, self.spread, self.weight = 0.0, 1.0, 1.0
        self.gram, self.moment = np.zeros((3, 3)), np.zeros(3)
        self.points: dict[int, tuple[float, float]] = {}

    @property
    def coefficients(self) -> np.ndarray:
        return np.linalg.solve(self.gram + RIDGE * np.diag([INTERCEPT, 1, 1]), self.moment)

    def learn(self, batch: Signal, seen: Traces) -> None:
        losses, (y, v) = batch.losses.numpy(), measure(seen)
        y = np.clip(y, np.median(y) - OUTLIER, np.median(y) + OUTLIER)
        if not self.scale:
            self.scale = 1e-3 * np.abs(losses).mean()
        x = features(losses, self.scale)
        self.gram, self.moment = DECAY * self.gram, DECAY * self.moment
        for row, value, variance in zip(x, y, v, strict=True):
            self.gram += np.outer(row, row) / (self.spread + variance)
            self.moment += row * value / (self.spread + variance)
        inverse = np.linalg.inv(self.gram + RIDGE * np.diag([INTERCEPT, 1, 1]))
        excess = left = 0.0
        for row, value, variance, place in zip(x, y, v, batch.index.tolist(), strict=True):
            residual = value - row @ self.coefficients
            free = min(1.0, max(0.0, 1 - row @ inverse @ row / (self.spread + variance)))
            excess, left = excess + residual**2 - free * variance, left + free
            kept, precision = self.points.get(place, (0.0, 0.0))
            new = (FORGET * kept + residual / variance, FORGET * precision + 1 / variance)
            self.points[place] = new
        kept = DECAY * self.weight
        self.spread = (kept * self.spread + excess) / (kept + left)
        self.spread = min(max(self.spread, LEAST_SPREAD), MOST_SPREAD)
        self.weight = kept + left


def batches(spread: float, outlier: float = 1.0) -> list[tuple[Signal, Traces]]:
    found = []
    for step in range(5):
        source = torch.Generator().manual_seed(step)
        losses = torch.exp(torch.randn(12, generator=source, dtype=torch.double))
        true = losses.square() * torch.exp(
            spread * torch.randn(12, generator=source, dtype=torch.double)
        )
        true[3] *= outlier
        index = torch.randperm(20, generator=source)[:12]
        found.append((signal(losses, 30, index=index, key=(0, step, 0)), sampled(true, 3, step)))
    return found


@pytest.mark.parametrize(("spread", "outlier"), [(0.0, 1.0), (1.0, 1.0), (9.0, 1.0), (0.5, 1e-40)])
def test_the_regression(spread: float, outlier: float) -> None:
    allocator, written = Neyman(running=True), Written()
    for batch, seen in batches(spread, outlier):
        allocator.learn(batch, seen)
        written.learn(batch, seen)
        learned = allocator._learned
        assert learned.scale == pytest.approx(written.scale)
        np.testing.assert_allclose(learned.gram, written.gram, rtol=1e-9)
        np.testing.assert_allclose(learned.moment, written.moment, rtol=1e-9, atol=1e-9)
        assert learned.spread == pytest.approx(written.spread, rel=1e-6)
        assert learned.spread_weight == pytest.approx(written.weight, rel=1e-6)
        places = sorted(written.points)
        assert learned.places.tolist() == places
        kept = np.array([written.points[place] for place in places])
        np.testing.assert_allclose(learned.residual, kept[:, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(learned.precision, kept[:, 1], rtol=1e-9)
    if spread == 9:
        assert learned.spread == MOST_SPREAD
    if spread == 0:
        assert learned.spread < 1


def test_the_least_spread() -> None:
    allocator = Neyman()
    for step in range(60):
        losses = torch.linspace(0.1, 3, 40).double()
        allocator.learn(signal(losses, key=(0, step, 0)), traces(losses.square(), 50))
    assert allocator._learned.spread == LEAST_SPREAD


@pytest.mark.parametrize("running", [False, True])
def test_what_is_expected_of_a_point(running: bool) -> None:
    """m + s / 2: with the residuals of earlier visits, where there were any."""
    allocator, written = Neyman(running=running), Written()
    for batch, seen in batches(1.0):
        allocator.learn(batch, seen)
        written.learn(batch, seen)
    index = torch.tensor([3, 99, 5, -1])
    batch = signal([0.5, 2.0, 0.1, 40.0], 30, index=index)
    mean = features(batch.losses.numpy(), written.scale) @ written.coefficients
    expected = []
    for place, m in zip(index.tolist(), mean, strict=True):
        kept, precision = written.points.get(place, (0.0, 0.0)) if running else (0.0, 0.0)
        weight = 1 / written.spread + precision
        expected.append(m + kept / weight + 0.5 / weight)
    relative = np.array(expected) - max(expected)
    np.testing.assert_allclose(allocator.log_expected(batch), np.clip(relative, -60, 0), rtol=1e-6)


def test_expected_traces_are_relative_and_bounded() -> None:
    allocator = Neyman(pilot=2)
    batch = signal(torch.ones(3), 30)
    allocator.learn(batch, traces([1.0, 1e-300, 1e300], 1_000_000))
    found = allocator.log_expected(batch)
    assert found.max() == 0
    assert -60 <= found.min() < -25  # clipped to the median's distance, and shrunk
    assert Neyman().log_expected(batch).tolist() == [0, 0, 0]


def test_raw_pilots_are_plugged_in() -> None:
    """A point without a valid trace gets the mean of the others."""
    allocator = Neyman(pilot=2, shrink=False)
    batch = signal(torch.ones(4), 30)
    seen = traces([1.0, 4.0, np.nan, 2.0], [2, 2, 2, 4])
    allocator.learn(batch, seen)
    y, _ = measure(seen)
    expected = y.copy()
    expected[2] = y[[0, 1, 3]].mean()
    np.testing.assert_allclose(allocator.log_expected(batch), expected - expected.max())
    nothing = Neyman(pilot=2, shrink=False)
    nothing.learn(batch, traces([np.nan] * 4))
    assert nothing.log_expected(batch).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("draws", [1, 2, 7])
def test_measurements_are_logs_without_bias(draws: int) -> None:
    values = np.array([1.0, 4.0, 0.25])
    y, v = measure(traces(values, draws))
    half = draws / 2
    np.testing.assert_allclose(y, np.log(values) - digamma(half) + np.log(half), rtol=1e-9)
    np.testing.assert_allclose(v, polygamma(1, half), rtol=1e-9)


def test_a_trace_of_zero_is_a_very_small_one() -> None:
    """1e-12 of the mean of the batch."""
    y, v = measure(traces([0.0, 6.0, 0.0], 2))
    np.testing.assert_allclose(y[0] - y[1], np.log(1e-12 * 2 / 6), rtol=1e-9)
    assert np.isfinite(v).all()


def test_a_state_is_all_that_was_learned() -> None:
    allocator = Neyman(running=True)
    for batch, seen in batches(1.0):
        allocator.learn(batch, seen)
    state: dict[str, Any] = allocator.state_dict()
    other = Neyman(running=True)
    other.load_state_dict(state)
    for name, value in vars(allocator._learned).items():
        np.testing.assert_array_equal(getattr(other._learned, name), value)
    allocator._learned.gram[0, 0] = 99  # neither shares memory with the state
    assert float(state["gram"][0, 0]) != 99
    state["gram"][0, 0] = 98
    assert other._learned.gram[0, 0] != 98
