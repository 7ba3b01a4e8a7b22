"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, then stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """Records a request to stop instead of stopping; a second one raises KeyboardInterrupt.

    Args:
        active: False leaves signals alone. So does a thread other than the main one, which cannot
            receive them.

    Attributes:
        requested: Whether a signal came.
    """

    def __init__(self, active: bool) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> GracefulStop:
        """Take the signals over."""
        if self._active:
            self._before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
