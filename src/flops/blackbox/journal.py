"""The journal: what a run needs to continue after a crash, on this machine or another.

- A request is on disk, byte for byte, before it is sent. If the process dies, the same bytes are
  sent again under the same idempotency key, and the service charges nothing.
- Values are on disk before they are used; their request is deleted in the same transaction.
- Discrete decisions of the tuner (queries per point, directions to measure) are on disk before the
  candidates that depend on them, and are never made twice.
- Snapshots hold the whole state of a run. Only rounds after the last snapshot are replayed, from
  the recorded values; rounds before the last but one are deleted, and only their totals are kept.

- Rows that failed for good are listed in ``failures``; their values are NaN.

Every row has a checksum, verified when it is read. A row belongs to an ask/tell round, numbered
from 0 (the column ``question``); requests and values also to a part of its candidates, or, with
``part`` = -1 - row, to a single one. Rounds at the end of a run have negative numbers: the run may
go on from before them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops import __version__
from flops.blackbox.journal_file import (
    PATIENCE,
    DiskFullError,
    JournalError,
    JournalFile,
    Statement,
    mark_of,
    pack,
    unpack,
    warn,
)
from flops.blackbox.journal_records import Request, Response, Round, Signature
from flops.blackbox.journal_settings import changes

SCHEMA = 3  # also counts streams of noise: answers belong to the noise that was sent
TABLES = """
create table about (name text primary key, value text not null);
create table plans (
    question integer primary key, kind text not null, points blob not null, mark blob not null);
create table decisions (
    question integer not null, place integer not null, name text not null, value blob not null,
    mark blob not null, primary key (question, place));
create table requests (
    question integer not null, part integer not null, place integer not null, key text not null,
    body blob not null, mark blob not null, primary key (question, part, place));
create table answers (
    question integer not null, part integer not null, count integer not null,
    answer blob not null, cost text not null, mark blob not null, primary key (question, part));
create table snapshots (
    question integer not null, place integer not null, pieces integer not null,
    data blob not null, mark blob not null, primary key (question, place));
create table totals (name text primary key, value integer not null);
create table counters (name text primary key, value real not null);
"""
LATER = """
create table if not exists kept (
    question integer not null, place integer not null, rows blob not null, answer blob not null,
    mark blob not null, primary key (question, place));
create table if not exists failures (
    question integer not null, row integer not null, point integer not null, reason text not null,
    primary key (question, row));
"""  # added to journals that were made without them
SNAPSHOTS = 2  # kept: if one is damaged, there is another
PIECE = 1 << 28  # bytes of a snapshot per row: SQLite allows less than 10^9


class Journal:
    """State and values of one run, in an SQLite file that only its owner can read.

    Args:
        path: The file; its folder is created if missing. ":memory:" keeps nothing on disk.
        settings: Everything that determines the run's candidates; a journal with other settings is
            refused.
        say: Called with a sentence about each problem and its remedy; warns by default.
        patience: Seconds of retries on a full disk.
        free: Settings in journals of earlier versions that may change now.

    Attributes:
        run: Random name of the run, part of its idempotency keys.
        version: flops version that started it.

    Raises:
        JournalError: If it belongs to another run or version, is damaged, or is in use.
    """

    def __init__(
        self,
        path: Path | str,
        settings: Mapping[str, Any],
        say: Callable[[str], None] = warn,
        patience: float = PATIENCE,
        free: Sequence[str] = (),
    ) -> None:
        self.path, self.say, self.free = path, say, tuple(free)
        self._places: dict[int, int] = {}
        self._counted: dict[str, float] = {}
        self._file = JournalFile(path, say, patience)
        try:
            self.run = self._about(settings)
        except JournalError:
            self._file.close()
            raise

    def read(self, number: int) -> Round:
        """Everything recorded about a round.

        Raises:
            JournalError: If its structure or decisions are damaged.
        """
        signature, decisions = None, []
        for kind, points, mark in self._file.read(
            "select kind, points, mark from plans where question = ?", number
        ):
            self._file.check(mark, f"the structure of round {number}", number, kind, points)
            signature = Signature(kind, tuple(np.frombuffer(points, dtype="<i8").tolist()))
        for place, name, value, mark in self._file.read(
            "select place, name, value, mark from decisions where question = ? order by place",
            number,
        ):
            what = f"decision {place} ({name}) before round {number}"
            self._file.check(mark, what, number, place, name, value)
            decisions.append((name, unpack(value)))
        requests: dict[int, list[Request]] = {}
        responses, damaged, paid = {}, {}, set()
        for part, place, key, body, mark in self._file.read(
            "select part, place, key, body, mark from requests where question = ? "
            "order by part, place",
            number,
        ):
            requests.setdefault(part, []).append(Request(key, bytes(body)))
            if mark != mark_of(number, part, place, key, body):
                damaged[part] = f"request {place} of round {number}, part {part}"
        for part, count, values, cost, mark in self._file.read(
            "select part, count, answer, cost, mark from answers where question = ?", number
        ):
            if mark != mark_of(number, part, count, values, cost):
                damaged[part] = f"the values of round {number}, part {part}"
                paid.add(part)
                continue
            columns = torch.from_numpy(np.frombuffer(values, dtype="<f4").copy())
            responses[part] = Response(columns.reshape(count, -1), json.loads(cost))
        for part in damaged:
            requests.pop(part, None)
        kept: dict[int, Tensor] = {}
        for place, rows, values, mark in self._file.read(
            "select place, rows, answer, mark from kept where question = ? order by place", number
        ):
            if mark == mark_of(number, place, rows, values):  # else they are evaluated again
                at = np.frombuffer(rows, dtype="<i8").tolist()
                columns = torch.from_numpy(np.frombuffer(values, dtype="<f4").copy())
                kept |= dict(zip(at, columns.reshape(len(at), -1), strict=True))
        return Round(signature, decisions, requests, responses, damaged, paid, kept)

    def write(
        self,
        number: int,
        signature: Signature | None = None,
        decisions: Sequence[tuple[str, Any]] = (),
        requests: Mapping[int, Sequence[Request]] | None = None,
        responses: Mapping[int, Response] | None = None,
        repaired: Iterable[int] = (),
        kept: Sequence[tuple[Tensor, Response]] = (),
        counted: Mapping[int, int] | None = None,
        failures: Mapping[int, tuple[int, str]] | None = None,
        again: int = 0,
    ) -> None:
        """Record parts of a round in one transaction; they are on disk when this returns.

        Args:
            number: Number of the round.
            signature: Of its candidates, the first time.
            decisions: Made before it.
            requests: By part, about to be sent.
            responses: By part; their requests are deleted.
            repaired: Parts among them whose earlier record was damaged.
            kept: Rows that arrived before the rest of their part, and their values.
            counted: Rows of the responses, by part, that were kept before.
            failures: Rows that are left out, with their points and the reasons.
            again: Rows that are evaluated once more, and charged again.

        Raises:
            JournalError: If it cannot be written, after retries on a full disk.
        """
        todo: list[Statement] = []
        if signature is not None:
            points = np.array(signature.points, dtype="<i8").tobytes()
            row = (number, signature.kind, points)
            todo.append(("insert into plans values (?, ?, ?, ?)", (*row, mark_of(*row))))
        for place, (name, value) in enumerate(decisions):
            given = (number, place, name, pack(value))
            todo.append(("insert into decisions values (?, ?, ?, ?, ?)", (*given, mark_of(*given))))
        for part, several in (requests or {}).items():
            for place, request in enumerate(several):
                sent = (number, part, place, request.key, request.body)
                todo.append(
                    (
                        "insert or replace into requests values (?,?,?,?,?,?)",
                        (*sent, mark_of(*sent)),
                    )
                )
        for rows, response in kept:
            todo += self._arrived(number, rows, response)
        damaged = set(repaired)
        for part, response in (responses or {}).items():
            before = (counted or {}).get(part, 0)
            todo += self._evaluated(number, part, response, part in damaged, before)
        for at, (point, reason) in (failures or {}).items():
            lost = (number, at, point, reason[:500])
            todo.append(("insert or replace into failures values (?, ?, ?, ?)", lost))
        if again:
            todo += [(_added("totals"), (name, again)) for name in ("queries", "extra")]
        if todo:
            self._commit(todo)

    def forget_kept(self, number: int) -> None:
        """Delete single rows of a round whose parts are all recorded."""
        tables = ("kept where question = ?", "requests where question = ? and part < 0")
        self._commit([(f"delete from {table}", (number,)) for table in tables])

    def failures(self) -> list[tuple[int, int, int, str]]:
        """Rows that were left out: round, row, point and reason."""
        return self._file.read("select * from failures order by question, row")

    def save(self, number: int, state: bytes) -> bool:
        """Store a snapshot of the state before a round, and delete rounds no longer needed.

        Returns:
            Whether there was room for it; without it, a restart replays more.
        """
        pieces = [state[i : i + PIECE] for i in range(0, len(state), PIECE)] or [b""]
        todo: list[Statement] = [("delete from snapshots where question >= ?", (number,))]
        for place, piece in enumerate(pieces):
            row = (number, place, len(pieces), piece)
            todo.append(("insert into snapshots values (?, ?, ?, ?, ?)", (*row, mark_of(*row))))
        before = [q for (q,) in self._file.read("select distinct question from snapshots")]
        oldest = sorted({*(q for q in before if q < number), number})[-SNAPSHOTS:][0]
        if len(before) + (number not in before) >= SNAPSHOTS:
            for table in ("snapshots", "plans", "decisions", "requests", "answers", "kept"):
                todo.append((f"delete from {table} where question between 0 and ?", (oldest - 1,)))
        try:
            self._commit(todo, patience=0.0)
        except DiskFullError:
            return False
        return True

    def snapshots(self) -> Iterator[tuple[int, bytes | None]]:
        """Round and state of each snapshot, the newest first; None for one that is damaged."""
        found = self._file.read("select distinct question from snapshots order by question desc")
        for (number,) in found:
            rows = self._file.read(
                "select place, pieces, data, mark from snapshots where question = ? order by place",
                number,
            )
            whole = bool(rows) and len(rows) == rows[0][1]
            whole = whole and all(
                mark == mark_of(number, place, pieces, data) for place, pieces, data, mark in rows
            )
            yield number, b"".join(bytes(row[2]) for row in rows) if whole else None

    def first(self) -> int | None:
        """The first round still recorded."""
        found: int | None = self._file.read("select min(question) from plans where question >= 0")[
            0
        ][0]
        return found

    def count(self, name: str, by: float) -> None:
        """Add to a counter of the run, over all its processes; saved with the next write."""
        self._counted[name] = self._counted.get(name, 0.0) + by

    def counters(self) -> dict[str, float]:
        """Counters of the run."""
        found: dict[str, float] = dict(self._file.read("select name, value from counters"))
        for name, value in self._counted.items():
            found[name] = found.get(name, 0.0) + value
        return found

    def paid(self) -> dict[str, int]:
        """Evaluated rows and parts, and their total costs; "extra" are rows beyond those asked."""
        return {"queries": 0, "answers": 0} | dict(
            self._file.read("select name, value from totals")
        )

    def close(self) -> None:
        """Save the counters and close the file."""
        if self._counted:
            try:
                self._commit([], patience=0.0)
            except JournalError:  # counters are informative only
                self._counted = {}
        self._file.close()

    def _commit(self, todo: Sequence[Statement], patience: float | None = None) -> None:
        """Write statements and counters in one transaction."""
        counted = [(_added("counters"), item) for item in self._counted.items()]
        self._file.commit([*todo, *counted], patience)
        self._counted = {}

    def _arrived(self, number: int, rows: Tensor, response: Response) -> Iterator[Statement]:
        at, values = rows.numpy().astype("<i8").tobytes(), _bytes(response.columns)
        found = self._file.read("select max(place) from kept where question = ?", number)[0][0]
        place = max(self._places.get(number, 0), 0 if found is None else found + 1)
        self._places[number] = place + 1
        row = (number, place, at, values)
        yield "insert into kept values (?, ?, ?, ?, ?)", (*row, mark_of(*row))
        for part in (-1 - rows).tolist():
            yield "delete from requests where question = ? and part = ?", (number, part)
        yield from _charged(number, {"queries": len(rows), **response.cost})

    def _evaluated(
        self, number: int, part: int, response: Response, repaired: bool, counted: int
    ) -> Iterator[Statement]:
        values, count = _bytes(response.columns), len(response.columns)
        row = (number, part, count, values, json.dumps(dict(response.cost)))
        verb = "insert or replace" if repaired else "insert"
        yield f"{verb} into answers values (?, ?, ?, ?, ?, ?)", (*row, mark_of(*row))
        yield "delete from requests where question = ? and part = ?", (number, part)
        costs = {"queries": count - counted, "answers": 1, **response.cost}
        if repaired and response.cost.get("replays") != 0:  # it was charged and counted before
            costs = {}
        yield from _charged(number, costs)

    def _about(self, settings: Mapping[str, Any]) -> str:
        """Check or write the settings of the run; return its name."""
        if not self._file.read("select name from sqlite_master where type = 'table'"):
            run = uuid.uuid4().hex
            rows = {"schema": str(SCHEMA), "run": run, "settings": json.dumps(dict(settings))}
            rows["version"] = __version__
            todo: list[Statement] = [(sql, ()) for sql in (TABLES + LATER).split(";")]
            todo = [one for one in todo if one[0].strip()]
            todo += [("insert into about values (?, ?)", row) for row in rows.items()]
            self._file.commit(todo, patience=0.0)
            self.version = __version__
            return run
        kept = dict(self._file.read("select name, value from about"))
        self.version = str(kept.get("version", "0.1.0 before journals had snapshots"))
        if kept.get("schema") != str(SCHEMA):
            raise JournalError(
                f"the journal {self.path} has schema {kept.get('schema')}, written by flops "
                f"{self.version}; this version ({__version__}) reads schema {SCHEMA}. Finish the "
                "run with the version that started it, or start again in another folder"
            )
        there = json.loads(kept["settings"])
        for name in self.free:
            there.pop(name, None)
        other = changes(there, settings)
        if other:
            raise JournalError(
                f"the journal {self.path} belongs to a run with other settings: {'; '.join(other)}."
                " Continue with those it has, or start again in another folder"
            )
        if len(self._file.read("select name from sqlite_master where name = 'failures'")) == 0:
            self._file.commit([(sql, ()) for sql in LATER.split(";") if sql.strip()])
        return str(kept["run"])


def _bytes(columns: Tensor) -> bytes:
    found: bytes = columns.to(torch.float32).contiguous().numpy().astype("<f4").tobytes()
    return found


def _charged(number: int, costs: Mapping[str, int]) -> Iterator[Statement]:
    """Add to the totals; the rows of an ending are extra."""
    more = {"extra": costs["queries"]} if number < 0 and costs.get("queries") else {}
    for name, value in {**costs, **more}.items():
        yield _added("totals"), (name, value)


def _added(table: str) -> str:
    return (
        f"insert into {table} values (?, ?) "
        "on conflict (name) do update set value = value + excluded.value"
    )
