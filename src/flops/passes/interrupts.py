"""Ctrl-C in the middle of a step: what it raises waits until the step can be left cleanly.

The handler of a signal runs between any two instructions, and that of Ctrl-C raises there: in the
middle of a swap of forwards, of ``.grad``, or of the very clean-up that an earlier one caused. So
while a step runs in the main thread, handlers are called at once as ever, but what they raise is
held. It is raised

- at once where the user's own code runs (the model's forward, the loss function), because an
  exception of theirs is what a step can take at any time;
- at the next `check` otherwise: before every pass, at every call of a module, before a commit;
- when the step is over, with everything written.

Once it was raised all further ones are held, so that the clean-up is never cut short. Handlers in
C (``SIG_DFL``) end the process as ever, and other threads receive no signals.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# Code that may be in the middle of a change. What enters and leaves contexts is such code too,
# whoever uses it; the rest of the standard library works for its caller.
_OURS = frozenset({__name__.partition(".")[0], "torch", "contextlib"})
_WORK_FOR_CALLER = sys.stdlib_module_names | {"numpy", ""}


class DeferSignals:
    """Holds what signal handlers raise while it is entered; inside another one it does nothing."""

    _active: DeferSignals | None = None  # that of the main thread

    def __init__(self) -> None:
        self._atomic = 0
        self._error: BaseException | None = None  # stays until the end: nobody can swallow it
        self._leaving = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._handler = self._handle  # one object, to be recognised

    def __enter__(self) -> DeferSignals:
        """Take the signals over."""
        if DeferSignals._active is not None or not _in_main_thread():
            return self
        DeferSignals._active = self
        try:
            for number in SIGNALS:
                before = signal.getsignal(number)
                if callable(before):  # a handler in Python
                    self._before[number] = before
                    signal.signal(number, self._handler)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back, and raise what is still held."""
        if DeferSignals._active is not self:
            return
        self._release()
        held, self._error = self._error, None
        if held is not None and not _in_chain(held, error):
            raise held.with_traceback(None)

    def _release(self) -> None:
        try:
            self._give_back(list(self._before))
        finally:
            DeferSignals._active = None

    def _give_back(self, numbers: list[int]) -> None:
        """Put the handlers back, that of Ctrl-C last: whatever raises before then is held."""
        if not numbers:
            return
        number = numbers.pop()
        try:
            # A generator may be closed in another thread, and somebody may have put a handler of
            # their own there since: the one of a closed hold only calls the one before it.
            if _in_main_thread() and signal.getsignal(number) is self._handler:
                signal.signal(number, self._before[number])
        finally:
            self._give_back(numbers)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            if DeferSignals._active is not self:
                raise
            self._error = error
            if self._leaving or self._atomic or not _is_users(frame):
                return
            self._leaving = True
            raise

    def check(self) -> None:
        """Raise what is held, unless something is to be done as a whole."""
        if self._error is not None and not self._atomic:
            self._leaving = True
            raise self._error.with_traceback(None)


def check() -> None:
    """A moment at which the step can be left: raises what is held."""
    active = DeferSignals._active
    if active is not None and active._error is not None and _in_main_thread():
        active.check()


class Atomic:
    """Work that is done as a whole or not at all, such as the commit of a step."""

    def __init__(self) -> None:
        self._deferring: DeferSignals | None = None

    def __enter__(self) -> None:
        """Raise what is held; what comes from here on waits."""
        check()
        if _in_main_thread() and DeferSignals._active is not None:
            self._deferring = DeferSignals._active
            self._deferring._atomic += 1

    def __exit__(self, *_: object) -> None:
        """Signals may raise again."""
        if self._deferring is not None:
            self._deferring._atomic -= 1


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_chain(error: BaseException, raised: BaseException | None) -> bool:
    """Whether what is being raised is that error, or was made of it."""
    seen: set[int] = set()
    while raised is not None and id(raised) not in seen:
        if raised is error:
            return True
        seen.add(id(raised))
        raised = raised.__cause__ or raised.__context__
    return False


def _is_users(frame: FrameType | None) -> bool:
    """Whether the code that was interrupted is neither of this library nor of torch."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OURS:
            return False
        if package not in _WORK_FOR_CALLER:
            return True
        frame = frame.f_back
    return True
