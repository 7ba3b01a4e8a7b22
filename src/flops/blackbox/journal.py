"""The journal: every answer is on the disk before it is used, so that none is paid for twice.

A run asks the same questions in the same order, since everything else follows from its seed. So a
run that was killed starts from its beginning: answers that are in the journal are taken from there,
and only what is missing is asked. The digest of each question is compared on the way; a run that
would ask something else is refused.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.errors import FlopsError

SCHEMA = 1
TABLES = """
create table if not exists about (name text primary key, value text not null);
create table if not exists answers (
    question integer not null, part integer not null, digest blob not null,
    count integer not null, answer blob not null, cost text not null,
    primary key (question, part)) without rowid;
create table if not exists counters (name text primary key, value real not null);
"""


class JournalError(FlopsError):
    """A journal is of another run, damaged, or in use."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What an objective answered, and what it took.

    Attributes:
        columns: Loss and what else is known of each row, float32 of shape (Q, k).
        cost: What is counted beside the rows, such as texts that were encoded.
    """

    columns: Tensor
    cost: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """Answers of one run, in an SQLite file.

    Args:
        path: The file; its folder is made if it is not there. ":memory:" keeps nothing.
        settings: What the run's questions follow from; a journal of other settings is refused.

    Attributes:
        run: Name of the run, random, for the keys of its requests.

    Raises:
        JournalError: If it is of another run, damaged, or another process writes to it.
    """

    def __init__(self, path: Path | str, settings: Mapping[str, Any]) -> None:
        self.path = path
        if str(path) != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._base = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            # One process at a time; the system lets go of the lock when that process dies.
            self._base.execute("pragma locking_mode = exclusive")
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = full")
            self._base.executescript("begin immediate;" + TABLES + "commit;")
            self.run = self._about(settings)
        except sqlite3.DatabaseError as error:
            self.close()
            busy = "locked" in str(error) or "busy" in str(error)
            why = "another process uses it" if busy else f"it cannot be read ({error})"
            raise JournalError(f"the journal {path}: {why}") from error
        except JournalError:
            self.close()
            raise

    def known(self, question: int) -> dict[int, tuple[bytes, Answer]]:
        """Digest and answer of each part of a question that was answered."""
        found = self._base.execute(
            "select part, digest, count, answer, cost from answers where question = ?", (question,)
        )
        return {
            part: (digest, Answer(_read(answer, count), json.loads(cost)))
            for part, digest, count, answer, cost in found
        }

    def write(self, question: int, part: int, digest: bytes, answer: Answer) -> None:
        """Keep an answer; it is on the disk when this returns."""
        values = answer.columns.to(torch.float32).contiguous().numpy().tobytes()
        row = (question, part, digest, len(answer.columns), values, json.dumps(dict(answer.cost)))
        self._base.execute("insert into answers values (?, ?, ?, ?, ?, ?)", row)

    def count(self, name: str, by: float) -> None:
        """Add to a counter of the run, over all its processes."""
        self._base.execute(
            "insert into counters values (?, ?) "
            "on conflict (name) do update set value = value + excluded.value",
            (name, by),
        )

    def counters(self) -> dict[str, float]:
        """What was counted so far."""
        return dict(self._base.execute("select name, value from counters"))

    def paid(self) -> dict[str, int]:
        """Rows that were answered, parts, and the sums of their costs."""
        total = {"queries": 0, "answers": 0}
        for count, cost in self._base.execute("select count, cost from answers"):
            total["queries"] += count
            total["answers"] += 1
            for name, value in json.loads(cost).items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        """Let go of the file."""
        if hasattr(self, "_base"):
            self._base.close()

    def _about(self, settings: Mapping[str, Any]) -> str:
        """Check or write what the run is; returns its name."""
        here = json.loads(json.dumps(dict(settings)))
        kept = dict(self._base.execute("select name, value from about"))
        if not kept:
            run = uuid.uuid4().hex
            rows = {"schema": str(SCHEMA), "run": run, "settings": json.dumps(here)}
            self._base.execute("begin immediate")
            self._base.executemany("insert into about values (?, ?)", rows.items())
            self._base.execute("commit")
            return run
        if kept["schema"] != str(SCHEMA):
            raise JournalError(
                f"the journal {self.path} has schema {kept['schema']}, this version reads {SCHEMA}"
            )
        there = json.loads(kept["settings"])
        other = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
        if other:
            now = ", ".join(f"{n} {there.get(n)!r} is now {here.get(n)!r}" for n in other[:3])
            raise JournalError(
                f"the journal {self.path} is of a run with other settings ({now}); "
                "go on with those, or start anew in another folder"
            )
        return str(kept["run"])


def _read(values: bytes, count: int) -> Tensor:
    found = torch.from_numpy(np.frombuffer(values, dtype=np.float32).copy())
    return found.reshape(count, -1)
