"""Ctrl-C and polite kills: finish the step, write a checkpoint, then stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Notes that the process was asked to stop, while it is entered; the second time it stops.

    Args:
        active: False leaves signals alone. So does a thread other than the main one, which cannot
            receive them.

    Attributes:
        asked: Whether a signal came.
    """

    def __init__(self, active: bool) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self.asked = False

    def __enter__(self) -> Stopping:
        """Take the signals over."""
        if self._active:
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
