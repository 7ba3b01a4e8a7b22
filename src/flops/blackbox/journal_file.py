"""The SQLite file of a journal: transactions, checksums, and what happens if it is damaged.

A transaction is written as a whole or not at all, with retries on a full disk. A file that is in
use or damaged, and a row that fails its checksum, are errors that say what to do.
"""

from __future__ import annotations

import hashlib
import io
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.errors import FlopsError

PATIENCE = 120.0  # seconds of retries on a full disk
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # how a full disk is reported

Statement = tuple[str, Sequence[Any]]


class JournalError(FlopsError):
    """A journal belongs to another run, is damaged or in use, or cannot be written."""


class DiskFullError(JournalError):
    """The disk is full."""


def warn(message: str) -> None:
    """Emit a warning; the default of `Journal`."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class JournalFile:
    """An SQLite file for one process at a time, readable by its owner only.

    Args:
        path: The file; its folder is created if missing. ":memory:" keeps nothing on disk.
        say: Called with a sentence when a full disk is retried.
        patience: Seconds of retries on a full disk.

    Raises:
        JournalError: If it is damaged or in use.
    """

    def __init__(self, path: Path | str, say: Callable[[str], None], patience: float) -> None:
        self.path, self.say, self.patience = path, say, patience
        self._full = False
        if str(path) != ":memory:":
            _make(Path(path))
        try:
            self._base = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            # One process at a time; the system releases the lock when that process dies.
            self._base.execute("pragma locking_mode = exclusive")
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = full")
            self._base.execute("pragma journal_size_limit = 67108864")  # after a large snapshot
        except sqlite3.DatabaseError as error:
            self.close()
            raise self.unreadable(error) from error

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_base"):
            self._base.close()

    def read(self, sql: str, *values: Any) -> list[Any]:
        """Rows of a query.

        Raises:
            JournalError: If it cannot be read.
        """
        try:
            return self._base.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self.unreadable(error) from error

    def commit(self, todo: Sequence[Statement], patience: float | None = None) -> None:
        """Commit all statements or none, with retries on a full disk."""
        end = time.monotonic() + (self.patience if patience is None else patience)
        wait = 0.1
        while True:
            try:
                self._base.execute("begin immediate")
                for sql, values in todo:
                    self._base.execute(sql, values)
                self._base.execute("commit")
            except sqlite3.Error as error:
                if self._base.in_transaction:
                    self._base.execute("rollback")
                if isinstance(error, sqlite3.IntegrityError) or not _full(error):
                    raise self.unreadable(error, "written") from error
                if time.monotonic() + wait > end:
                    raise DiskFullError(
                        f"the journal {self.path} cannot be written ({error}): free some space on "
                        "its disk and start the same command again; no value is lost, and nothing "
                        "is charged twice"
                    ) from error
                if not self._full:
                    self.say(
                        f"the journal {self.path} cannot be written ({error}); retrying for "
                        f"{self.patience:.0f} s"
                    )
                    self._full = True
                time.sleep(wait)
                wait = min(2 * wait, 5.0)
            else:
                self._full = False
                return

    def check(self, mark: bytes, what: str, *values: Any) -> None:
        """Refuse a row that fails its checksum.

        Raises:
            JournalError: With what is damaged.
        """
        if mark != mark_of(*values):
            raise JournalError(
                f"the journal {self.path} is damaged: {what} fails its checksum. Restore the file "
                "from a backup, or start again in another folder"
            )

    def unreadable(self, error: sqlite3.Error, verb: str = "read") -> JournalError:
        """Why the file cannot be used, and what to do."""
        busy = "locked" in str(error) or "busy" in str(error)
        why = "it is in use by another process" if busy else f"it cannot be {verb} ({error})"
        if "malformed" in str(error):
            why += ": it is damaged. Restore it from a backup, or start again in another folder"
        return JournalError(f"the journal {self.path}: {why}")


def pack(value: Any) -> bytes:
    """Serialize tensors, numbers, strings and containers of them, without pickled code."""
    buffer = io.BytesIO()
    torch.save(_plain(value), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Inverse of `pack`."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _plain(value: Any) -> Any:
    """Copy without numpy types, which `torch.load(weights_only=True)` refuses."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"a state must be made of tensors, numbers and strings, not {value!r}")


def mark_of(*values: Any) -> bytes:
    """Checksum of a row."""
    found = hashlib.sha256()
    for value in values:
        data = bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()
        found.update(f"{len(data)}:".encode())
        found.update(data)
    return found.digest()


def _full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in FULL


def _make(path: Path) -> None:
    """Create the file readable by its owner only; SQLite's other files take its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    if os.name == "posix":
        path.chmod(0o600)
        for suffix in ("-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.chmod(0o600)
