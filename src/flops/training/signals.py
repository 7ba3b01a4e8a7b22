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
        active: Whether to install handlers; never done outside the main thread, which receives
            signals.

    Attributes:
        requested: Whether a signal was received.
    """

    def __init__(self, active: bool) -> None:
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> GracefulStop:
        """Install the handlers."""
        if self._active:
            self._before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
