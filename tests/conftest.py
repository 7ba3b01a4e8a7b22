"""Shared models and helpers."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator

# Set before torch is imported: two test processes on two cores want one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor, nn

from flops import ES, FZOO, JVP, LOZO, SPSA, Exact, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.passes.guards import SIGNALS, DeferSignals
from flops.perturb import random

THREADS = torch.get_num_threads()
ESTIMATORS = {
    "leaf": LikelihoodRatio(targets="leaf"),
    "block": LikelihoodRatio(),
    "stage": LikelihoodRatio(targets="stage"),
    "antithetic": LikelihoodRatio(baseline="antithetic"),
    "rademacher": LikelihoodRatio(noise="rademacher"),
    "orthogonal": LikelihoodRatio(noise="orthogonal"),
    "es": ES(),
    "es-shared": ES(shared=True),
    "es-shaped": ES(shaping=Shaping()),
    "spsa": SPSA(),
    "spsa-shared": SPSA(shared=True),
    "spsa-shaped": SPSA(shaping=Shaping()),
    "fzoo": FZOO(),
    "lozo": LOZO(),
    "jvp": JVP(),
    "exact": Exact(),
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: looking for garbage among them takes seconds in every process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    if torch.get_num_threads() != THREADS:  # a test before it has left another number
        torch.set_num_threads(THREADS)
    state = torch.get_rng_state()
    torch.manual_seed(1234)
    yield
    torch.set_rng_state(state)


@pytest.fixture(params=["cpu", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How noise is made: as on the CPU, or (here on the CPU, too) as on every other device."""
    if request.param == "device":
        monkeypatch.setattr(random, "native", lambda device: False)
    return request.param


@pytest.fixture
def handlers_stay() -> Iterator[None]:
    """The test leaves the handlers of signals as they were, and nothing held.

    Ctrl-C raises, also where the tests run in the background of a script, which ignores it.
    """
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert DeferSignals._active is None
    signal.signal(signal.SIGINT, ours)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of each point."""
    return (outputs - targets).square().flatten(1).sum(1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all gradients by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def flat(parts: dict[str, Tensor]) -> Tensor:
    """All gradients as one vector, in the order of their names."""
    return torch.cat([parts[name].flatten() for name in sorted(parts)])


def estimate(model: nn.Module, loss_fn, x, y, groups, **options) -> dict[str, Tensor]:
    """Gradients of one step from a clean state."""
    model.zero_grad()
    ForwardGradient(model, loss_fn, groups, **options).estimate(x, y)
    return gradients(model)


def exact(model: nn.Module, loss_fn, x, y) -> dict[str, Tensor]:
    """Backpropagated gradients, by plain autograd."""
    model.zero_grad()
    loss_fn(model(x), y).mean().backward()
    return gradients(model)


def exact_group(model: nn.Module) -> list[Group]:
    return [Group(model, Exact(), queries=1)]


def sign_vectors(size: int) -> Tensor:
    """All 2^size sign vectors."""
    return torch.tensor(list(itertools.product([1.0, -1.0], repeat=size)))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
