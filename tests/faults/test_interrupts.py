"""Ctrl-C in the middle of a step, and what it leaves behind."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import SPSA, DeepZero, ForwardGradient, Group, diagnose
from flops.blackbox import Tuner
from tests.conftest import gradients, squared
from tests.support.during import data, during, interrupt, model
from tests.support.interrupting import Campaign

pytestmark = pytest.mark.usefixtures("handlers_stay")

SIGNALS_SENT = 100
MANY_SIGNALS_SENT = int(os.environ.get("FLOPS_INTERRUPTS", "10000"))

posix = pytest.mark.skipif(os.name != "posix", reason="another process sends the signals")


@posix
# A signal may hit a callback of the garbage collector, which swallows what is raised there. It is
# raised again at the next check, as the test sees.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_at_random_moments_leave_nothing_behind() -> None:
    campaign = Campaign(seed=int.from_bytes(os.urandom(2), "big"))
    campaign.run(SIGNALS_SENT)
    assert not campaign.faults, (campaign.seed, campaign.faults)
    assert campaign.outcomes["left"] > SIGNALS_SENT / 4


@posix
@pytest.mark.slow
def test_many_signals_at_random_moments_leave_nothing_behind() -> None:
    campaign = Campaign(seed=0)
    campaign.run(MANY_SIGNALS_SENT)
    print(campaign.outcomes, sorted(campaign.moments.items()))
    assert not campaign.faults
    assert campaign.outcomes["left"] > MANY_SIGNALS_SENT / 2


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_signal_in_the_loss_function(at: int) -> None:
    net, (x, y) = model(), data()
    fg = ForwardGradient(net, during(interrupt, at), Group(net, SPSA(sigma=1e-2), 4), chunk=4)
    with pytest.raises(KeyboardInterrupt):
        fg.estimate(x, y)
    assert fg.steps == 0
    assert not gradients(net)
    fg.estimate(x, y)
    assert fg.steps == 1


def test_a_hanging_forward_can_be_left() -> None:
    class Hangs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            timer.start()
            while time.monotonic() < end:
                pass
            return x

    net, (x, y), end = nn.Sequential(nn.Linear(4, 2), Hangs()), data(), time.monotonic() + 30
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ForwardGradient(net, squared).estimate(x, y)
    assert time.monotonic() < end


def test_a_signal_in_the_commit_comes_after_it() -> None:
    class Noisy(Tensor):
        """A gradient that gets a signal when it is written to: code of the user's."""

        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any) -> Any:
            if getattr(func, "__name__", "") == "add_":
                interrupt()
            return super().__torch_function__(func, *rest)

    net, (x, y) = model(), data()
    twin = copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter).as_subclass(Noisy)
    fg = ForwardGradient(net, squared)
    with pytest.raises(KeyboardInterrupt):
        fg.estimate(x, y)
    ForwardGradient(twin, squared).estimate(x, y)
    assert fg.steps == 1
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad.as_subclass(Tensor), other.grad)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_trial_does_not_take_a_signal_for_a_failed_pass(error: type[BaseException]) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    def group(net: nn.Sequential) -> Group:
        return Group(net[2].requires_grad_(), SPSA(sigma=1e-2), 4)

    net, (x, y) = model().requires_grad_(False), data()
    passes = [0]

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        passes[0] += 1
        return squared(outputs, targets)

    cost = ForwardGradient(net, counted, group(net)).estimate(x, y).forward_equivalents.queries
    assert cost < 4 * len(x)  # what lies before is replayed, as a trial confirms
    assert passes[0] > 3  # two passes that look at the structure, and more
    before = signal.signal(signal.SIGINT, handler)
    try:
        for at in range(1, passes[0] + 1):
            fg = ForwardGradient(net, during(interrupt, at), group(net))
            with pytest.raises(error):
                fg.estimate(x, y)
            assert fg.estimate(x, y).forward_equivalents.queries == cost
    finally:
        signal.signal(signal.SIGINT, before)


def test_estimate_in_a_signal_handler() -> None:
    net, other, (x, y) = model(), model(), data()
    inner = ForwardGradient(other, squared)
    before = signal.signal(signal.SIGINT, lambda *_: inner.estimate(x, y))
    try:
        fg = ForwardGradient(net, during(interrupt))
        fg.estimate(x, y)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (fg.steps, inner.steps) == (1, 1)


def test_estimate_in_a_loss_function() -> None:
    net, other, (x, y) = model(), model(), data()
    inner = ForwardGradient(other, squared)
    fg = ForwardGradient(net, during(lambda: inner.estimate(x, y)))
    fg.estimate(x, y)
    assert (fg.steps, inner.steps) == (1, 1)
    held = ForwardGradient(other, during(interrupt, 1))
    fg = ForwardGradient(net, during(lambda: held.estimate(x, y)))
    with pytest.raises(KeyboardInterrupt):
        fg.estimate(x, y)
    assert (fg.steps, held.steps) == (0, 0)


@pytest.mark.parametrize("at", [1, 4, 12])
def test_diagnose(at: int) -> None:
    net, (x, y) = model(), data()
    before = {n: p.clone() for n, p in net.named_parameters()}
    group = Group(net, DeepZero(score_draws=2, sigma=1e-2), 2)
    with pytest.raises(KeyboardInterrupt):
        diagnose(net, during(interrupt, at), x, y, groups=group, repeats=2, sigmas=())
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_a_tuner_is_told_as_a_whole() -> None:
    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            interrupt()
            return super().step(closure)

    def made(kind: type[torch.optim.SGD]) -> Tuner:
        return Tuner(
            torch.zeros(3),
            lambda parameters, points: (parameters - points.unsqueeze(1)).square().sum(1),
            points=8,
            queries=4,
            batch=4,
            optimizer=lambda p: kind(p, 1e-2),
        )

    undisturbed, tuner = made(torch.optim.SGD), made(Interrupted)
    for _ in range(3):
        undisturbed.step()
        with pytest.raises(KeyboardInterrupt):
            tuner.step()
        assert tuner.steps == undisturbed.steps
        assert torch.equal(tuner.parameters, undisturbed.parameters)
        assert tuner.asked == undisturbed.asked
