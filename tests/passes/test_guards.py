"""A signal waits for the next check in our code, and leaves the user's at once."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import pytest

from flops import FlopsError
from flops.passes.guards import Atomic, DeferSignals, check
from tests.support.during import interrupt, run_in_thread

pytestmark = pytest.mark.usefixtures("handlers_stay")


def test_what_is_raised_in_our_code_waits_for_the_next_check() -> None:
    seen = []

    def work() -> None:
        with DeferSignals(), Atomic():
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

    with pytest.raises(KeyboardInterrupt), DeferSignals():
        users()


def test_code_of_torch_goes_on_to_the_next_check() -> None:
    seen = []
    scope = {"__name__": "torch.nn.functional", "interrupt": signal.raise_signal, "seen": seen}
    exec("def relu():\n    interrupt(2)\n    seen.append('went on')", scope)

    def work() -> None:
        with DeferSignals():
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
        with DeferSignals(), Atomic():
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
        with DeferSignals(), Atomic():
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
        with DeferSignals():
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
        with DeferSignals():
            swallows()
            check()
            pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    with pytest.raises(KeyboardInterrupt), DeferSignals():
        swallows()


def test_an_error_of_the_step_does_not_hide_it() -> None:
    def work() -> None:
        with DeferSignals(), Atomic():
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

    with pytest.raises(ValueError, match="stopped"), DeferSignals():
        users()


def test_a_handler_that_was_put_there_meanwhile_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    calls: list[int] = []
    first = signal.getsignal(signal.SIGINT)
    try:
        with DeferSignals():
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
        with DeferSignals(), Atomic():
            found.append(signal.getsignal(signal.SIGINT))
            check()

    run_in_thread(other)
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_hold_costs_microseconds() -> None:
    def once() -> float:
        started = time.thread_time()  # whatever else the machine does
        for _ in range(20):
            with DeferSignals(), Atomic():
                check()
        return (time.thread_time() - started) / 20

    assert min(once() for _ in range(100)) < 2e-4
