"""Deferred signals: exceptions of signal handlers during a step are deferred to a safe point.

A signal handler runs between any two bytecode instructions, and that of Ctrl-C raises there: while
``forward`` or ``.grad`` is being replaced, or during the clean-up after an earlier signal. So while
a step runs in the main thread, handlers are called immediately, but their exceptions are deferred.
They are raised

- immediately in the user's code (the model's forward, the loss function), where a step handles any
  exception;
- else at the next `check`: before every pass, at every call of a module, before a commit;
- at the latest when the step has ended, with everything written.

After one was raised all others are deferred, so that clean-up is not interrupted. Handlers in C
(``SIG_DFL``) end the process as usual, and other threads receive no signals.
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
# Code that may be changing state, including that of context managers. The rest of the standard
# library counts as part of its caller.
_OURS = frozenset({__name__.partition(".")[0], "torch", "contextlib"})
_WORK_FOR_CALLER = sys.stdlib_module_names | {"numpy", ""}


class DeferSignals:
    """Context in which exceptions of signal handlers are deferred; a nested one does nothing."""

    _active: DeferSignals | None = None  # in the main thread

    def __init__(self) -> None:
        self._atomic = 0
        self._error: BaseException | None = (
            None  # kept until the end, so that it cannot be swallowed
        )
        self._leaving = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._handler = self._handle  # one object, to compare by identity

    def __enter__(self) -> DeferSignals:
        """Install the handlers."""
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
        """Restore the handlers, and raise a deferred exception."""
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
        """Restore the handlers, Ctrl-C's last: exceptions before that are deferred."""
        if not numbers:
            return
        number = numbers.pop()
        try:
            # A generator may be closed in another thread, and the user may have installed another
            # handler since: ours then only calls the one before it.
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
        """Raise the deferred exception, except inside `Atomic`."""
        if self._error is not None and not self._atomic:
            self._leaving = True
            raise self._error.with_traceback(None)


def check() -> None:
    """A safe point of the step: raises the deferred exception."""
    active = DeferSignals._active
    if active is not None and active._error is not None and _in_main_thread():
        active.check()


class Atomic:
    """Context that no signal interrupts, such as the commit of a step."""

    def __init__(self) -> None:
        self._deferring: DeferSignals | None = None

    def __enter__(self) -> None:
        """Raise a deferred exception; later ones are deferred until the context ends."""
        check()
        if _in_main_thread() and DeferSignals._active is not None:
            self._deferring = DeferSignals._active
            self._deferring._atomic += 1

    def __exit__(self, *_: object) -> None:
        """Allow signals to raise."""
        if self._deferring is not None:
            self._deferring._atomic -= 1


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_chain(error: BaseException, raised: BaseException | None) -> bool:
    """Whether the raised exception is that error, or was caused by it."""
    seen: set[int] = set()
    while raised is not None and id(raised) not in seen:
        if raised is error:
            return True
        seen.add(id(raised))
        raised = raised.__cause__ or raised.__context__
    return False


def _is_users(frame: FrameType | None) -> bool:
    """Whether the interrupted code belongs neither to this library nor to torch."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OURS:
            return False
        if package not in _WORK_FOR_CALLER:
            return True
        frame = frame.f_back
    return True
