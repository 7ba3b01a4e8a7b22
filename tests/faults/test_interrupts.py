"""Ctrl-C in the middle of a step, threads that share a model, and what both leave behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    SPSA,
    DeepZero,
    FlopsError,
    ForwardGradient,
    Group,
    diagnose,
)
from flops.blackbox import Tuner
from flops.passes.interrupts import SIGNALS, Hold, Whole, check
from tests.conftest import gradients, squared
from tests.support.interrupting import Campaign

SIGNALS_SENT = 200
MANY_SIGNALS_SENT = int(os.environ.get("FLOPS_INTERRUPTS", "10000"))

posix = pytest.mark.skipif(os.name != "posix", reason="another process sends the signals")


def interrupt() -> None:
    """A signal here and now: its handler runs before the next line."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Every test leaves the handlers as they were, and nothing held."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert Hold._active is None


# The rule


def test_what_is_raised_in_our_code_waits_for_the_next_check() -> None:
    seen = []

    def work() -> None:
        with Hold(), Whole():
            interrupt()
            check()
            seen.append("all of it was done")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["all of it was done"]


def test_the_users_code_is_left_at_once() -> None:
    def users() -> None:
        interrupt()
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt), Hold():
        users()


def test_code_of_torch_goes_on_to_the_next_check() -> None:
    seen = []
    scope = {"__name__": "torch.nn.functional", "interrupt": signal.raise_signal, "seen": seen}
    exec("def relu():\n    interrupt(2)\n    seen.append('went on')", scope)

    def work() -> None:
        with Hold():
            scope["relu"]()
            check()
            seen.append("went on again")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["went on"]


def test_a_handler_of_the_users_own_is_called_at_once_and_may_return() -> None:
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with Hold(), Whole():
            interrupt()
            assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal")
@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
def test_other_signals_with_a_handler_in_python(error: type[BaseException]) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    def work(number: int) -> None:
        with Hold(), Whole():
            signal.raise_signal(number)
            seen.append(number)

    seen: list[int] = []
    before = [signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGALRM)]
    try:
        for number in (signal.SIGTERM, signal.SIGALRM):
            with pytest.raises(error):
                work(number)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert len(seen) == 2


def test_clean_up_is_not_cut_short_by_a_second_one() -> None:
    seen = []

    def work() -> None:
        with Hold():
            try:
                interrupt()
            finally:
                interrupt()
                seen.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["cleaned up"]


def test_it_cannot_be_swallowed() -> None:
    def swallows() -> None:
        try:
            interrupt()
        except BaseException:
            return

    def work() -> None:
        with Hold():
            swallows()
            check()
            pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    with pytest.raises(KeyboardInterrupt), Hold():
        swallows()


def test_an_error_of_the_step_does_not_hide_it() -> None:
    def work() -> None:
        with Hold(), Whole():
            interrupt()
            raise FlopsError("a loss is not finite")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, FlopsError)


def test_an_error_made_of_it_is_the_users_choice() -> None:
    def users() -> None:
        try:
            interrupt()
        except KeyboardInterrupt as error:
            raise ValueError("stopped") from error

    with pytest.raises(ValueError, match="stopped"), Hold():
        users()


def test_a_handler_that_was_put_there_meanwhile_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    calls: list[int] = []
    first = signal.getsignal(signal.SIGINT)
    try:
        with Hold():
            ours = signal.signal(signal.SIGINT, other)
        assert signal.getsignal(signal.SIGINT) is other
        signal.signal(signal.SIGINT, ours)  # whoever put it there puts back what was there
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, first)


def test_other_threads_have_nothing_to_do_with_it() -> None:
    found: list[Any] = []

    def other() -> None:
        with Hold(), Whole():
            found.append(signal.getsignal(signal.SIGINT))
            check()

    run_in_thread(other)
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_hold_costs_microseconds() -> None:
    def once() -> float:
        started = time.thread_time()  # whatever else the machine does
        for _ in range(20):
            with Hold(), Whole():
                check()
        return (time.thread_time() - started) / 20

    assert min(once() for _ in range(100)) < 2e-4


# Steps


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randn(6, 2)


def during(action: Callable[[], Any], at: int = 3) -> Any:
    """A loss function that does something in its n-th call."""
    calls = [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == at:
            action()
        return squared(outputs, targets)

    return loss


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
    cost = ForwardGradient(net, squared, group(net)).estimate(x, y).forward_equivalents.queries
    assert cost < 4 * len(x)  # what lies before is replayed, as the trials find out
    before = signal.signal(signal.SIGINT, handler)
    try:
        for at in range(1, 9):
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
            8,
            lambda parameters, points: (parameters - points.unsqueeze(1)).square().sum(1),
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


# Threads


def run_in_thread(work: Callable[[], Any]) -> list[BaseException]:
    found: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, name="the other one")
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return found


def tied(net: nn.Sequential) -> nn.Sequential:
    other = model()
    other[0].weight = net[0].weight
    return other


@pytest.mark.parametrize(
    ("shares", "names"),
    [
        (lambda net: net, r"\['model', '0', '1', '2'\]"),
        (lambda net: nn.Sequential(net[0], nn.Linear(5, 2)), r"\['0'\]"),
        (tied, "parameters"),
    ],
)
def test_a_second_thread_on_one_model_is_refused(
    shares: Callable[[nn.Sequential], nn.Module], names: str
) -> None:
    net, (x, y) = model(), data()
    second = ForwardGradient(shares(net), squared)
    found: list[BaseException] = []
    fg = ForwardGradient(
        net, during(lambda: found.extend(run_in_thread(lambda: second.estimate(x, y))))
    )
    fg.estimate(x, y)
    assert (fg.steps, second.steps) == (1, 0)
    assert len(found) == 1
    with pytest.raises(FlopsError, match=f"'MainThread' is in the middle of a step.*{names}"):
        raise found[0]
    second.estimate(x, y)


def test_two_models_in_two_threads() -> None:
    engines = [ForwardGradient(model(), squared) for _ in range(2)]
    twins = copy.deepcopy(engines)
    x, y = data()

    def work(fg: ForwardGradient) -> None:
        for _ in range(20):
            fg.estimate(x, y)

    threads = [threading.Thread(target=work, args=(fg,)) for fg in engines]
    enabled = torch.backends.mha.get_fastpath_enabled()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    for fg, twin in zip(engines, twins, strict=True):
        work(twin)
        for name, gradient in gradients(fg.model).items():
            assert torch.equal(gradient, gradients(twin.model)[name])


def test_the_switch_of_attention_is_back_after_the_last_thread() -> None:
    net, (x, y) = model(), data()
    inside, outside = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        assert outside.wait(30)

    enabled = torch.backends.mha.get_fastpath_enabled()
    late = ForwardGradient(model(), during(waits))
    thread = threading.Thread(target=late.estimate, args=(x, y))

    def start() -> None:
        thread.start()
        assert inside.wait(30)

    ForwardGradient(net, during(start)).estimate(x, y)
    assert not torch.backends.mha.get_fastpath_enabled()  # the other one needs it off
    outside.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_a_step_inside_a_pass_over_the_same_model_is_refused() -> None:
    net, (x, y) = model(), data()
    inner = ForwardGradient(net, squared)
    fg = ForwardGradient(net, during(lambda: inner.estimate(x, y), at=1))
    with pytest.raises(FlopsError, match="in the middle of a pass of another estimate"):
        fg.estimate(x, y)
    assert (fg.steps, inner.steps) == (0, 0)
    assert not gradients(net)
    inner.estimate(x, y)


def test_models_are_neither_kept_nor_marked() -> None:
    net, (x, y) = model(), data()
    keys = [set(module.__dict__) for module in net.modules()]
    fg = ForwardGradient(net, squared)
    fg.estimate(x, y)
    assert keys == [set(module.__dict__) for module in net.modules()]
    copy.deepcopy(fg).estimate(x, y)
    pickle.loads(pickle.dumps(net))
    gone = weakref.ref(net)
    del net, fg
    gc.collect()
    assert gone() is None
