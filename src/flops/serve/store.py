"""The answer store: every answer is on disk before it is sent, so that none is charged twice.

Files are named ledger.sqlite and options --ledger, for compatibility with the first version.

SQLite with a write-ahead log and `synchronous=FULL`: a commit has reached the disk. One thread
writes; everything pending goes into one transaction, so that the answers of a batch share one
flush. Readers have their own connection and see committed data.

Every answer has a checksum, and points are identified by theirs. Damaged rows are logged and not
served: an answer is computed again (the same bits, free of charge), points must be uploaded again.
Nothing is ever evicted, since a lost answer would be charged twice: a store at its size limit
accepts nothing new. When the disk is full, stored answers are still served, and writing is retried
with every new answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, Timeout

from flops.errors import FlopsError
from flops.serve.schema import RequestCost
from flops.storage.locks import acquire_lock

SCHEMA = """
create table if not exists identity (name text primary key, value text not null);
create table if not exists answers (
    key text primary key, digest text not null, body blob not null, queries integer not null,
    texts integer not null, images integer not null, written real not null,
    checksum text not null default ''
) without rowid;
create table if not exists points (digest text primary key, body blob not null);
create table if not exists totals (name text primary key, value integer not null);
insert or ignore into totals values
    ('queries', 0), ('texts', 0), ('images', 0), ('requests', 0), ('replays', 0);
"""
COLUMNS = "key, digest, body, queries, texts, images"
Done = Callable[[Exception | None], None]

log = logging.getLogger("flops.serve")
PATIENCE = 3.0  # timeout of the lock in seconds
KEPT_LOG = 16 * 2**20  # bytes to which a longer write-ahead log is truncated


class StoreError(FlopsError):
    """The store belongs to another model, is in use, or cannot be read or written."""


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as stored and sent: serialized logits under the key of its request."""

    key: str
    digest: str  # of the body of the request
    body: bytes
    cost: RequestCost

    def checksum(self) -> str:
        """SHA-256 of all fields."""
        mark = hashlib.sha256(repr((self.key, self.digest, *vars(self.cost).values())).encode())
        mark.update(self.body)
        return mark.hexdigest()


@dataclass(frozen=True)
class _Write:
    answers: Sequence[StoredAnswer] = ()
    points: tuple[str, bytes | bytearray] | None = None
    done: Done | None = None


class AnswerStore:
    """Answers by idempotency key, points by digest, and totals.

    Args:
        path: The file; created with its folder if missing.
        identity: Digest of model and classes, which the answers depend on. A store of another one
            is rejected, because its answers would be wrong.
        most: Largest size of the file in bytes, including its write-ahead log.

    Raises:
        StoreError: The store belongs to another model, is in use, or cannot be opened.
    """

    def __init__(self, path: Path, identity: str, most: int | None = None) -> None:
        self.path, self.most = path, most
        self._log = path.with_name(path.name + "-wal")
        self._damaged: set[str] = set()  # keys of answers and digests of points
        self._failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            _make_private(path)
            self._writer = self._connect()
            self._reader = self._connect()
            self._writer.executescript(SCHEMA)
            self._add_checksums()
            self._writer.execute("insert or ignore into identity values ('model', ?)", [identity])
            found = self._reader.execute("select value from identity where name = 'model'")
            owner = str(found.fetchone()[0])
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the answer store {path} cannot be opened: {error}") from error
        if owner != identity:
            self._reader.close()
            self._writer.close()
            self._lock.release()
            raise StoreError(
                f"the answer store {path} holds answers of another model or other classes "
                f"({owner[:12]}, not {identity[:12]}); choose another file with --ledger"
            )
        self._reading = threading.Lock()
        self._replays = self._written = self.usage_on_disk()["replays"]
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def find(self, key: str) -> StoredAnswer | None:
        """The intact answer under a key, if any."""
        rows = self._read(f"select {COLUMNS}, checksum from answers where key = ?", key)
        if not rows:
            return None
        try:
            name, digest, body, *numbers, checksum = rows[0]
            answer = StoredAnswer(
                str(name), str(digest), bytes(body), RequestCost(*map(int, numbers))
            )
            if answer.checksum() == checksum:
                return answer
        except (TypeError, ValueError):  # a value of another type
            pass
        if key not in self._damaged:
            log.error("the answer %s in the store is damaged; it is computed again", key)
            self._damaged.add(key)
        return None

    def damaged(self, key: str) -> bool:
        """Whether the answer under a key was damaged, and will be replaced free of charge."""
        return key in self._damaged

    def points(self, digest: str) -> bytearray | None:
        """The body that was uploaded under a digest."""
        rows = self._read("select body from points where digest = ?", digest)
        if not rows:
            return None
        body = rows[0][0]
        if isinstance(body, bytes) and hashlib.sha256(body).hexdigest() == digest:
            return bytearray(body)
        if digest not in self._damaged:
            log.error("the points %s in the store are damaged; upload them again", digest)
            self._damaged.add(digest)
        return None

    def has_points(self, digest: str) -> bool:
        """Whether points were uploaded under a digest."""
        found = bool(self._read("select 1 from points where digest = ?", digest))
        return found and digest not in self._damaged

    def stored(self) -> int:
        """Bytes of all points."""
        return int(self._read("select coalesce(sum(length(body)), 0) from points")[0][0])

    def size(self) -> int:
        """Bytes of the file and its write-ahead log."""
        found = 0
        for path in (self.path, self._log):
            with suppress(OSError):
                found += path.stat().st_size
        return found

    def full(self) -> str | None:
        """Error message of a full store; None if there is room."""
        if self.most is None or (size := self.size()) < self.most:
            return None
        return (
            f"the answer store has {size} bytes, and the limit is {self.most}: nothing new is "
            "accepted, repeats are still answered; restart the service with a larger --max-ledger "
            "or another --ledger"
        )

    def usage(self) -> dict[str, int]:
        """Totals over all answers; replays are free and counted separately."""
        return self.usage_on_disk() | {"replays": self._replays}

    def usage_on_disk(self) -> dict[str, int]:
        """Totals on disk; the last replays may be missing."""
        return {str(name): int(value) for name, value in self._read("select * from totals")}

    def keep(self, answers: Sequence[StoredAnswer], done: Done) -> None:
        """Write answers; `done` is called from the writing thread when they are on disk."""
        self._writes.put(_Write(answers=answers, done=done))

    def keep_points(self, digest: str, body: bytes | bytearray, done: Done) -> None:
        """Write points; `done` is called from the writing thread when they are on disk."""
        self._writes.put(_Write(points=(digest, body), done=done))

    def replayed(self) -> None:
        """Count a replay; written with the next transaction.

        Called from one thread only; never blocks.
        """
        self._replays += 1

    def close(self) -> None:
        """Write pending data and close the file."""
        self._writes.put(None)
        self._thread.join()
        with suppress(sqlite3.Error):  # such as a full disk: the log remains and is valid
            with self._reading:
                self._reader.close()
            self._writer.close()
        self._lock.release()

    def _add_checksums(self) -> None:
        """Add checksums to a store of an older version."""
        columns = [row[1] for row in self._writer.execute("pragma table_info(answers)")]
        if "checksum" in columns:
            return
        self._writer.execute("begin immediate")
        self._writer.execute("alter table answers add column checksum text not null default ''")
        names = [row[0] for row in self._writer.execute("select key from answers").fetchall()]
        for name in names:
            found = self._writer.execute(f"select {COLUMNS} from answers where key = ?", [name])
            key, digest, body, *numbers = found.fetchone()
            checksum = StoredAnswer(key, digest, body, RequestCost(*numbers)).checksum()
            self._writer.execute("update answers set checksum = ? where key = ?", [checksum, name])
        self._writer.execute("commit")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute(f"pragma journal_size_limit = {KEPT_LOG}")
        return connection

    def _read(self, statement: str, *values: str) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the answer store {self.path} cannot be read: {error}") from error

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
                with suppress(sqlite3.Error):
                    if self._writer.in_transaction:
                        self._writer.execute("rollback")
            self._report(failure)
            for write in writes:
                if write.done is not None:
                    write.done(failure)

    def _report(self, failure: Exception | None) -> None:
        """Log one line when writing starts to fail, and one when it works again."""
        if failure is not None and not self._failing:
            log.error("the answer store %s cannot be written: %s", self.path, failure)
        elif failure is None and self._failing:
            log.warning("the answer store %s can be written again", self.path)
        self._failing = failure is not None

    def _commit(self, writes: Sequence[_Write]) -> None:
        replays = self._replays
        if not writes and replays == self._written:
            return
        now = time.time()
        self._writer.execute("begin immediate")
        answers = [answer for write in writes for answer in write.answers]
        repaired = {a.key for a in answers if a.key in self._damaged}
        self._writer.executemany("delete from answers where key = ?", [[key] for key in repaired])
        self._writer.executemany(
            f"insert into answers ({COLUMNS}, written, checksum) values (?, ?, ?, ?, ?, ?, ?, ?)",
            [(a.key, a.digest, a.body, *vars(a.cost).values(), now, a.checksum()) for a in answers],
        )
        answers = [answer for answer in answers if answer.key not in repaired]  # already charged
        for write in writes:
            if write.points is not None:
                self._writer.execute("insert or replace into points values (?, ?)", write.points)
                repaired.add(write.points[0])
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
        self._damaged -= repaired


def _make_private(path: Path) -> None:
    """Make it readable by its owner only; SQLite's other files get the same permissions."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if os.name == "posix" and path.is_file():
        for found in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                found.chmod(0o600)


def _locked(path: Path) -> BaseFileLock:
    """Lock the store until the process ends."""
    try:
        # A killed process takes a moment to release it.
        return acquire_lock(path.with_name(path.name + ".lock"), PATIENCE)
    except Timeout as error:
        raise StoreError(
            f"the answer store {path} is in use by another service; stop it, or choose another "
            "file with --ledger"
        ) from error
