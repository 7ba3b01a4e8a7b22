"""The state of a tuner: resumed, copied, refused; seeds, and what two tuners share."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from flops.allocators import Gaussian
from flops.blackbox import Tuner
from flops.errors import FlopsError
from tests.support.tuned_functions import ALLOCATORS, START, A, D, N, make, quadratic


@pytest.mark.parametrize("allocator", ["equal", "bernoulli", "gaussian", "kernel", "pilot"])
@pytest.mark.parametrize("kind", ["lr", "spsa", "shaped-lr"])
@pytest.mark.bits
def test_a_resumed_run_is_the_same_run(kind, allocator) -> None:
    whole = make(kind=kind, allocator=allocator, batch=3)
    list(whole.run(3))
    state = whole.state_dict()
    list(whole.run(4))
    resumed = make(kind=kind, allocator=allocator, batch=3)
    resumed.load_state_dict(state)
    list(resumed.run(4))
    assert torch.equal(whole.parameters, resumed.parameters)
    assert (whole.asked, whole.steps) == (resumed.asked, resumed.steps)
    assert whole.asked == 4 * 21 + 3 * 14


def test_the_state_is_not_shared_with_the_tuner() -> None:
    tuner = make(kind="shaped-lr", allocator="kernel")
    tuner.step()
    state = tuner.state_dict()
    kept = copy.deepcopy(state)
    list(tuner.run(2))
    assert torch.equal(state["theta"], kept["theta"])
    moments = [s["state"][0]["exp_avg"] for s in (state["optimizer"], kept["optimizer"])]
    assert torch.equal(*moments)
    once, again = make(kind="shaped-lr", allocator="kernel"), make(kind="shaped-lr", seed=9)
    again.allocator = copy.deepcopy(ALLOCATORS["kernel"])
    for each in (once, again):  # the seed is part of the state
        each.load_state_dict(state)
        list(each.run(2))
    assert torch.equal(once.parameters, again.parameters)
    assert torch.equal(once.parameters, tuner.parameters)


def test_states_that_do_not_fit_are_refused() -> None:
    tuner = make()
    tuner.ask()
    with pytest.raises(FlopsError, match="in progress"):
        tuner.state_dict()
    tuner.step()
    state = tuner.state_dict()
    other = Tuner(torch.zeros(D + 1), points=N)
    with pytest.raises(FlopsError, match="another number"):
        other.load_state_dict(state)
    with pytest.raises(FlopsError, match="another version"):
        tuner.load_state_dict({**state, "schema": 99})


def test_seeds_differ_and_global_random_state_is_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        tuner = make(kind="shaped-lr", allocator="kernel", seed=seed)
        list(tuner.run(3))
        runs.append(tuner.parameters)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_an_allocator_given_to_two_tuners_is_not_shared() -> None:
    shared, found = Gaussian(), []
    for _ in range(2):
        tuner = Tuner(START, quadratic, points=N, allocator=shared, queries=6, embeddings=A)
        list(tuner.run(3))
        found.append(tuner.parameters)
    assert torch.equal(*found)
    assert str(shared.state_dict()) == str(Gaussian().state_dict())
    assert str(shared.state_dict()) != str(tuner.allocator.state_dict())
