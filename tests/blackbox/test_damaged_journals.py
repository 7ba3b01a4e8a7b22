"""Journals that are damaged, too old, or readable by others."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flops.blackbox import Candidates
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal, JournalError, Signature
from tests.support.keyed_service import D, Service
from tests.support.small_tunings import end


def damage(path: Path, table: str, column: str, where: str = "") -> None:
    """Flip a bit in the first row."""
    with closing(sqlite3.connect(path)) as base, base:
        order = "order by question desc" if table == "snapshots" else ""
        row, data = base.execute(
            f"select rowid, {column} from {table} {where} {order} limit 1"
        ).fetchone()
        flipped = bytearray(data)
        flipped[len(flipped) // 2] ^= 4
        base.execute(f"update {table} set {column} = ? where rowid = ?", (bytes(flipped), row))


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        ("plans", "points", "the structure of round 0 fails its checksum"),
        ("decisions", "value", r"decision 0 \(counts\) before round 0 fails its checksum"),
    ],
)
def test_damaged_structure_is_named(table, column, message, tmp_path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {})
    journal.write(0, Signature("query", (1, 2)), [("counts", torch.ones(2))])
    journal.close()
    damage(path, table, column)
    journal = Journal(path, {})
    with pytest.raises(JournalError, match=f"{message}.*backup"):
        journal.read(0)
    journal.close()


def test_a_damaged_answer_is_asked_for_again_under_its_key(tmp_path) -> None:
    path, service = tmp_path / "journal", Service()
    candidates = Candidates(torch.ones(8, D), torch.arange(8))

    def ask(values: Candidates) -> Tensor:
        journal = Journal(path, {})
        try:
            return Evaluator(service, journal, part=2).evaluate(values)
        finally:
            journal.close()

    first = ask(candidates)
    for _ in range(2):  # once repaired it is sound
        damage(path, "answers", "answer", "where part = 1")
        assert torch.equal(ask(candidates), first)
        assert torch.equal(ask(Candidates(torch.zeros(8, D), torch.arange(8))), first)
    assert service.charged == 8
    journal = Journal(path, {})
    assert journal.paid()["queries"] == 8
    journal.close()
    damage(path, "answers", "answer", "where part = 1")
    with pytest.raises(
        JournalError, match=r"the values of round 0, part 1 fails its checksum.*409.*backup"
    ):
        ask(Candidates(torch.zeros(8, D), torch.arange(8)))
    assert service.charged == 8


def test_a_damaged_request_is_made_again(tmp_path) -> None:
    path, service = tmp_path / "journal", Service(breaks=1)
    candidates = Candidates(torch.ones(8, D), torch.arange(8))
    journal = Journal(path, {})
    with pytest.raises(ConnectionError):
        Evaluator(service, journal, part=4).evaluate(candidates)
    journal.close()
    damage(path, "requests", "body")
    service.breaks, journal = 10**9, Journal(path, {})
    assert journal.read(0).damaged == {1: "request 0 of round 0, part 1"}
    Evaluator(service, journal, part=4).evaluate(candidates)
    assert service.charged == 8
    assert journal.paid()["queries"] == 8
    journal.close()


def test_a_damaged_snapshot_is_replaced_by_the_one_before(tmp_path) -> None:
    path, service = tmp_path / "journal", Service()
    run = end(path, "lr", service)
    damage(path, "snapshots", "data")
    with pytest.warns(RuntimeWarning, match=r"snapshot before round \d+ .* is damaged.*continuing"):
        again = end(path, "lr", service)
    assert torch.equal(again.best, run.best)
    assert service.charged == run.asked
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("update snapshots set mark = x'00'")
    with pytest.raises(JournalError, match=r"snapshots before the rounds \[.*backup"):
        end(path, "lr", service)


def test_a_journal_is_its_owners(tmp_path) -> None:
    if os.name != "posix":
        pytest.skip("permissions are those of POSIX")
    path, before = tmp_path / "journal", os.umask(0)
    try:
        journal = Journal(path, {})
        journal.write(0, Signature("query", (1,)))
        found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
        journal.close()
    finally:
        os.umask(before)
    assert found["journal"] == 0o600
    assert found["journal-wal"] == 0o600
    assert set(found.values()) == {0o600}


def test_a_journal_of_the_former_version_is_explained(tmp_path) -> None:
    path = tmp_path / "journal"
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("create table about (name text primary key, value text not null)")
        base.execute("insert into about values ('schema', '1'), ('run', 'x'), ('settings', '{}')")
    with pytest.raises(JournalError, match=r"schema 1, written by flops 0\.1\.0 before.*schema 3"):
        Journal(path, {})
    with closing(sqlite3.connect(path)) as base:  # as it was
        assert base.execute("select count(*) from sqlite_master").fetchone()[0] == 2
