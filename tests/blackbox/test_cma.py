"""CMA-ES with the tuner's interface."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flops.blackbox.cma import CMAES
from flops.errors import FlopsError
from tests.support.tuned_functions import START, A, N, quadratic


def test_evolution_improves_is_reproducible_and_disturbs_nobody() -> None:
    pytest.importorskip("cma")
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    def run(seed: int) -> CMAES:
        search = CMAES(START, quadratic, points=N, sigma=0.3, batch=3, population=8, seed=seed)
        assert search.step_cost() == 24
        while search.steps < 60:
            search.tell(search.evaluate(search.ask()))
            np.random.rand()  # somebody else's draws must not matter
        assert search.asked == sum(8 * (3, 2)[step % 2] for step in range(60))
        return search

    kept = np.random.get_state()
    one = run(0)
    np.random.set_state(kept)
    np.random.seed(7)
    two, other = run(0), run(1)
    assert torch.equal(one.parameters, two.parameters)
    assert not torch.equal(one.parameters, other.parameters)
    before = float(quadratic(START.expand(N, -1), torch.arange(N)).mean())
    least = float(quadratic(A.double().mean(0).expand(N, -1), torch.arange(N)).mean())
    after = float(quadratic(one.parameters.expand(N, -1), torch.arange(N)).mean())
    assert after - least < 0.4 * (before - least)
    np.random.seed(1)
    assert random.getstate() == states[0]
    search = CMAES(START, quadratic, points=N, population=4)
    search.tell(search.evaluate(search.ask()))
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    with pytest.raises(FlopsError, match="sigma must be positive"):
        CMAES(START, points=N, sigma=0)
