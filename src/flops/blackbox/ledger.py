"""The ledger: every answer is on disk before it is sent, so that none is ever paid for twice.

SQLite with a write-ahead log and `synchronous=FULL`: a commit has reached the disk. One thread
writes; what waits when it is free goes into one transaction, so that the answers of a batch share
one flush. Readers have a connection of their own and see what is committed.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops.blackbox.requests import Cost
from flops.errors import FlopsError

SCHEMA = """
create table if not exists identity (name text primary key, value text not null);
create table if not exists answers (
    key text primary key, digest text not null, body blob not null, queries integer not null,
    texts integer not null, images integer not null, written real not null
) without rowid;
create table if not exists points (digest text primary key, body blob not null);
create table if not exists totals (name text primary key, value integer not null);
insert or ignore into totals values
    ('queries', 0), ('texts', 0), ('images', 0), ('requests', 0), ('replays', 0);
"""
Done = Callable[[Exception | None], None]

PATIENCE = 3.0  # seconds to wait for the lock


class LedgerError(FlopsError):
    """The ledger belongs to another model, is in use, or cannot be read or written."""


@dataclass(frozen=True)
class Answer:
    """An answer as it is kept and sent: logits as a body, under the key of its request."""

    key: str
    digest: str  # of the body of the request
    body: bytes
    cost: Cost


@dataclass(frozen=True)
class _Write:
    answers: Sequence[Answer] = ()
    points: tuple[str, bytes | bytearray] | None = None
    done: Done | None = None


class Ledger:
    """Answers by idempotency key, points by digest, and totals.

    Args:
        path: The file; made with its folder if it is not there.
        identity: What the answers depend on (the digest of model and classes). A ledger of another
            one is refused, because its answers would be wrong.

    Raises:
        LedgerError: See there.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            self._writer = self._connect()
            self._reader = self._connect()
            self._writer.executescript(SCHEMA)
            self._writer.execute("insert or ignore into identity values ('model', ?)", [identity])
            found = self._reader.execute("select value from identity where name = 'model'")
            owner = str(found.fetchone()[0])
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {error}") from error
        if owner != identity:
            self._reader.close()
            self._writer.close()
            os.close(self._lock)
            raise LedgerError(
                f"the ledger {path} holds answers of another model or other classes "
                f"({owner[:12]}, not {identity[:12]}); choose another file with --ledger"
            )
        self._reading = threading.Lock()
        self._replays = self._written = self.usage_on_disk()["replays"]
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def find(self, key: str) -> Answer | None:
        """The answer that was kept under a key."""
        rows = self._read(
            "select key, digest, body, queries, texts, images from answers where key = ?", key
        )
        if not rows:
            return None
        key, digest, body, *numbers = rows[0]
        return Answer(str(key), str(digest), bytes(body), Cost(*map(int, numbers)))

    def points(self, digest: str) -> bytearray | None:
        """The body that was uploaded under a digest."""
        rows = self._read("select body from points where digest = ?", digest)
        return bytearray(rows[0][0]) if rows else None

    def has_points(self, digest: str) -> bool:
        """Whether points were uploaded under a digest."""
        return bool(self._read("select 1 from points where digest = ?", digest))

    def stored(self) -> int:
        """Bytes of all points."""
        return int(self._read("select coalesce(sum(length(body)), 0) from points")[0][0])

    def usage(self) -> dict[str, int]:
        """Totals over all answers ever kept; a replay is free and counted apart."""
        return self.usage_on_disk() | {"replays": self._replays}

    def usage_on_disk(self) -> dict[str, int]:
        """Totals that would survive now; the last replays may be missing."""
        return {str(name): int(value) for name, value in self._read("select * from totals")}

    def keep(self, answers: Sequence[Answer], done: Done) -> None:
        """Write answers; `done` is called from the writing thread when they are on disk."""
        self._writes.put(_Write(answers=answers, done=done))

    def keep_points(self, digest: str, body: bytes | bytearray, done: Done) -> None:
        """Write points; likewise."""
        self._writes.put(_Write(points=(digest, body), done=done))

    def replayed(self) -> None:
        """Count an answer that was given again; written along with whatever comes next.

        To be called by one thread; it never waits.
        """
        self._replays += 1

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writes.put(None)
        self._thread.join()
        with self._reading:
            self._reader.close()
        self._writer.close()
        os.close(self._lock)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        return connection

    def _read(self, statement: str, *values: str) -> list[Any]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()

    def _write(self) -> None:
        last = False
        while not last:
            group = [self._writes.get()]
            while group[-1] is not None and not self._writes.empty():
                group.append(self._writes.get())
            last = group[-1] is None
            writes = [write for write in group if write is not None]
            failure: Exception | None = None
            try:
                self._commit(writes)
            except (sqlite3.Error, OSError) as error:
                failure = error
                if self._writer.in_transaction:
                    self._writer.execute("rollback")
            for write in writes:
                if write.done is not None:
                    write.done(failure)

    def _commit(self, writes: Sequence[_Write]) -> None:
        replays = self._replays
        if not writes and replays == self._written:
            return
        now = time.time()
        self._writer.execute("begin immediate")
        answers = [answer for write in writes for answer in write.answers]
        self._writer.executemany(
            "insert into answers values (?, ?, ?, ?, ?, ?, ?)",
            [(a.key, a.digest, a.body, *vars(a.cost).values(), now) for a in answers],
        )
        for write in writes:
            if write.points is not None:
                self._writer.execute("insert or ignore into points values (?, ?)", write.points)
        totals = {
            "queries": sum(a.cost.queries for a in answers),
            "texts": sum(a.cost.texts for a in answers),
            "images": sum(a.cost.images for a in answers),
            "requests": len(answers),
            "replays": replays - self._written,
        }
        self._writer.executemany(
            "update totals set value = value + ? where name = ?",
            [(value, name) for name, value in totals.items() if value],
        )
        self._writer.execute("commit")
        self._written = replays


def _locked(path: Path) -> int:
    """Hold the ledger for this process alone; the lock goes when the process does."""
    handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return handle
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as error:
            if time.monotonic() < end:  # a process that was killed takes a moment to let go
                time.sleep(0.05)
                continue
            os.close(handle)
            raise LedgerError(
                f"the ledger {path} is in use by another service; stop it, or choose another file "
                f"with --ledger"
            ) from error
