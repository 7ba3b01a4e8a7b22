"""Programs that a tuner runs, each with all that it starts, which end when the tuner does."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from flops.blackbox.objective import ObjectiveError


class Programs:
    """Runs programs, in any thread, until they are stopped."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._evaluations = 0

    def run(self, words: Sequence[str], key: str, timeout: float | None) -> tuple[str, str, int]:
        """What a program prints and its errors, and its exit status.

        Raises:
            ObjectiveError: If it cannot be started.
            TimeoutError: If it takes too long.
            KeyboardInterrupt: If programs are stopped, which is no failure of the row.
        """
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            try:
                process = subprocess.Popen(
                    words,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    env=os.environ | {"FLOPS_KEY": key},
                    start_new_session=True,  # so that what it starts ends with it
                )
            except OSError as error:
                raise ObjectiveError(f"--command cannot be started: {error}") from error
            self._running.add(process)
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException as error:
            _kill(process)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"{words[0]} took more than {timeout:g} s") from error
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if self._stopped and process.returncode:
            raise KeyboardInterrupt
        return said, errors, process.returncode

    def stop(self) -> None:
        """End those that run, and start no more until `resume`."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                if process.returncode is None:  # else its number may be another's
                    _kill(process)

    def resume(self) -> None:
        """Let programs run again."""
        self._stopped = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation: outside of one, `interrupt` does nothing."""
        self._evaluations += 1
        try:
            yield
        finally:
            self._evaluations -= 1

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handler of a signal: interrupt the evaluation that runs in the main thread."""
        if self._evaluations:
            raise KeyboardInterrupt


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def start_worker() -> None:
    """In a process that evaluates: an interrupt ends its evaluation, not the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, PROGRAMS.interrupt)


PROGRAMS = Programs()  # of this process
