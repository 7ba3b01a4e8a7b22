"""Neyman: counts by the root of the traces, shrunk, remembered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flops.allocators import Neyman, Signal
from flops.allocators.counts import feasible, objective
from flops.allocators.neyman import _predict as predict
from flops.allocators.neyman import measure
from flops.errors import QueryError
from tests.support.allocation import relative_j, sampled, signal, traces


@pytest.mark.parametrize("draws", [1, 2, 5, 20])
def test_neyman_measures_log_traces_without_bias(draws: int) -> None:
    size = 40_000
    for level in (1e-200, 1.0, 1e200):
        true = level * torch.tensor([1e-2, 1.0, 1e2]).double().repeat_interleave(size)
        y, v = measure(sampled(true, draws, 0))
        deviation = (y - true.log().numpy()).reshape(3, size)
        stated = float(v[0])
        assert (np.abs(deviation.mean(axis=1)) < 5 * (stated / size) ** 0.5).all()
        np.testing.assert_allclose(deviation.var(axis=1), stated, rtol=0.1)


def test_neyman_measures_nothing_where_nothing_is_known() -> None:
    y, v = measure(traces([1.0, np.nan, np.inf, 4.0, 0.0], [2, 2, 2, 0, 2]))
    assert np.isinf(v).tolist() == [False, True, True, True, False]
    assert np.isfinite(y).all()
    y, v = measure(traces(torch.zeros(3)))
    assert np.isinf(v).all()


def test_neyman_counts_go_by_the_root_of_the_traces() -> None:
    """With exact pilots there is nothing to shrink."""
    source = torch.Generator().manual_seed(0)
    losses = torch.rand(100, generator=source)
    true = torch.exp(2 * torch.randn(100, generator=source, dtype=torch.float64))
    for shrink in (True, False):
        allocator = Neyman(pilot=2, shrink=shrink)
        batch = signal(losses, 200)
        allocator.learn(batch, traces(true, 1e6))
        counts = allocator.allocate(batch).double().numpy()
        ideal = feasible(np.sqrt(true.numpy()), float(batch.budget), 1.0)
        np.testing.assert_allclose(counts, ideal, rtol=0.02, atol=1)


def synthetic(step: int, spread: float = 0.5, size: int = 64) -> tuple[Signal, Tensor]:
    """Traces that follow the loss up to a factor of exp(spread)."""
    source = torch.Generator().manual_seed(step)
    losses = torch.exp(1.5 * torch.randn(size, generator=source, dtype=torch.float64))
    noise = torch.randn(size, generator=source, dtype=torch.float64)
    true = losses.square() * torch.exp(spread * noise)
    return signal(losses, 30, key=(0, step, 0)), true


def ratio(allocator: Neyman, spread: float, steps: int = 40) -> float:
    """Mean J over the optimum, in the later half of the steps, with pilots of two draws."""
    found = []
    for step in range(steps):
        batch, true = synthetic(step, spread)
        allocator.learn(batch, sampled(true, 2, 1000 + step))
        values = true.numpy()
        ideal = objective(values, feasible(np.sqrt(values), float(batch.budget), 1.0))
        found.append(objective(values, allocator.allocate(batch).double().numpy()) / ideal)
    return float(np.mean(found[steps // 2 :]))


@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0])
def test_neyman_shrinks_noisy_pilots(spread: float) -> None:
    raw = ratio(Neyman(pilot=2, shrink=False), spread)
    shrunk = ratio(Neyman(pilot=2), spread)
    regression = ratio(Neyman(), spread)
    assert raw > 1.4
    assert shrunk < 1.02 + 0.15 * spread
    assert shrunk < regression + 0.005  # a pilot never hurts, but for its price
    assert 1 <= shrunk < 1 + 0.4 * (raw - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_neyman_knows_how_little_small_batches_say(size: int) -> None:
    """A curve through three points leaves no residual; the spread must not vanish for that."""
    spreads = []
    for run in range(30):
        allocator = Neyman()
        for step in range(30):
            batch, true = synthetic(1000 * run + step, 1.0, size)
            allocator.learn(batch, sampled(true, 20, 5000 * run + step))
        spreads.append(allocator._learned.spread)
    assert 0.6 < np.mean(spreads) < 1.5


def property_of_points(running: bool, pilot: int = 0, order: bool = False) -> float:
    """J over equal in the fourth epoch; the trace belongs to the point, the loss says nothing."""
    source = torch.Generator().manual_seed(1)
    true = torch.exp(2 * torch.randn(256, generator=source, dtype=torch.float64))
    allocator, found = Neyman(running=running, pilot=pilot), []
    for step in range(4 * 8):
        if step % 8 == 0:
            order = torch.randperm(256, generator=source)
        index = order[32 * (step % 8) : 32 * (step % 8 + 1)]
        losses = torch.rand(32, generator=source)
        batch = signal(losses, 10, index=index, key=(0, step, 0))
        if pilot:
            allocator.learn(batch, sampled(true[index], pilot, step))
        counts = allocator.allocate(batch)
        if not pilot:
            allocator.learn(batch, sampled(true[index], 10, step))
        if step >= 24:
            found.append(relative_j(counts, true[index]))
    return float(np.mean(found))


def test_neyman_remembers_points() -> None:
    without, running = property_of_points(False), property_of_points(True)
    assert without > 0.95
    assert running < 0.6
    assert property_of_points(True, pilot=2) < property_of_points(False, pilot=2) - 0.02


def test_neyman_counts_a_pilot_once() -> None:
    """The running measurements hold the pilot's already."""
    batch, true = synthetic(0)
    allocators = [Neyman(pilot=2), Neyman(pilot=2, running=True)]
    for allocator in allocators:
        allocator.learn(batch, sampled(true, 2, 0))
    assert torch.equal(*(a.allocate(batch) for a in allocators))


def test_neyman_pilot_is_of_its_batch_alone() -> None:
    allocator, fresh = Neyman(pilot=2), Neyman(pilot=2)
    batch, true = synthetic(0)
    allocator.learn(batch, sampled(true, 2, 0))
    fresh.load_state_dict(allocator.state_dict())
    other, _ = synthetic(1)
    assert torch.equal(allocator.allocate(other), fresh.allocate(other))
    assert not torch.equal(allocator.allocate(batch), fresh.allocate(batch))


@pytest.mark.parametrize("index", [[-5, 3], [2**40, 1]])
def test_neyman_takes_any_integers_as_index(index: list[int]) -> None:
    allocator = Neyman(running=True)
    batch = signal([1.0, 1.0], 20, index=torch.tensor(index))
    for _ in range(3):
        allocator.learn(batch, traces([1.0, 100.0], 50))
    counts = allocator.allocate(batch)
    assert counts[1] > 4 * counts[0]
    swapped = replace(batch, index=batch.index.flip(0))
    assert torch.equal(allocator.allocate(swapped), counts.flip(0))
    elsewhere = replace(batch, index=torch.tensor([7, 8]))
    assert allocator.allocate(elsewhere).tolist() == [20, 20]


def test_neyman_needs_an_index_to_remember_by() -> None:
    allocator = Neyman(running=True)
    batch = signal(torch.rand(4), index=None)
    with pytest.raises(QueryError, match=r"group 'g'.*index="):
        allocator.allocate(batch)  # before a query is made in vain
    with pytest.raises(QueryError, match="index="):
        allocator.learn(batch, traces(torch.rand(4)))
    with pytest.raises(ValueError, match="pilot"):
        Neyman(shrink=False)


def test_neyman_pilot_is_the_posterior_of_regression_and_measurement() -> None:
    """Precisions 1 / spread and 1 / v: the log of the mean of a log-normal trace, by hand."""
    losses = torch.rand(30).double() + 0.1
    allocator = Neyman(pilot=3)
    for step in range(3):
        batch = signal(losses, key=(0, step, 0))
        shown = sampled(losses.square() * torch.rand(30).double().exp(), 3, step)
        allocator.learn(batch, shown)
    plain, (y, v) = Neyman(), measure(shown)
    plain.load_state_dict(allocator.state_dict())
    spread = float(allocator.state_dict()["spread"])
    prior = predict(plain._learned, batch)
    shape = plain.log_expected(batch)  # up to a constant
    np.testing.assert_allclose(shape - shape.max(), prior - prior.max(), atol=1e-12)
    weight = 1 / spread + 1 / v
    expected = (prior / spread + y / v) / weight + 0.5 / weight
    np.testing.assert_allclose(allocator.log_expected(batch), expected - expected.max(), atol=1e-10)
    shares = np.exp(expected / 2)
    ideal = shares / shares.sum() * batch.budget
    assert (np.abs(allocator.allocate(batch).numpy() - ideal) <= 2).all()
