"""Lock files: one process at a time, for as long as it lives."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock


def acquire_lock(path: Path, timeout: float = 0.0, mode: int = 0o600) -> BaseFileLock:
    """Lock a file until released or until the process ends.

    Args:
        path: The lock file; it is not deleted on release.
        timeout: Seconds to wait for another process.
        mode: Permissions of a new file.

    Raises:
        filelock.Timeout: Another process holds it.
        OSError: The file cannot be created.
    """
    with suppress(PermissionError):  # acquiring the lock reports the error
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, mode))
    lock = FileLock(path, timeout=timeout, thread_local=False)
    lock.acquire(poll_interval=0.05)
    return lock
