"""Snapshots of a run: how many, of which version, and that they hold no code."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Any

import pytest
import torch

from flops.blackbox.journal import Journal, JournalError, pack, unpack
from flops.blackbox.snapshots import Snapshots
from tests.support.keyed_service import A, Service
from tests.support.small_tunings import end, make


def test_snapshots_are_few_and_the_journal_stays_small(tmp_path) -> None:
    path = tmp_path / "journal"
    run = end(path, "lr", Service())
    with closing(sqlite3.connect(path)) as base:
        kept = base.execute("select distinct question from snapshots").fetchall()
        oldest = base.execute(
            "select min(question), count(*) from answers where question >= 0"
        ).fetchone()
        assert base.execute("select count(*) from requests").fetchone() == (0,)
        total = base.execute("select value from totals where name = 'queries'").fetchone()[0]
    assert len(kept) == 2
    assert oldest[0] == min(kept)[0]
    assert total == run.asked
    assert oldest[1] < 15  # of some 90
    asked = Service()
    again = end(path, "lr", asked)  # only what came behind the last snapshot, from the journal
    assert asked.charged == 0
    assert again.history == run.history
    assert torch.equal(again.best, run.best)


def test_large_states_are_snapshot_seldom(tmp_path, monkeypatch) -> None:
    journal, clock = Journal(tmp_path / "journal", {}), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Slow:
        taken = 0

        def state_dict(self) -> dict[str, Any]:
            clock[0] += 2.0  # seconds that a snapshot takes
            self.taken += 1
            return {"taken": self.taken}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.taken = state["taken"]

    run = Slow()
    snapshots = Snapshots(run, journal)
    for step in range(1000):
        clock[0] += 1.0
        snapshots.offer(step)
    assert clock[0] == 1000 + 2 * run.taken
    assert 0.015 < 2 * run.taken / clock[0] <= 0.03
    assert Snapshots(other := Slow(), journal).restore() is not None
    assert other.taken == run.taken
    journal.close()


def test_a_snapshot_of_another_state_version_names_who_wrote_it(tmp_path) -> None:
    run, journal = make("lr"), Journal(tmp_path / "journal", {})
    state = run.state_dict()
    state["stepper"]["schema"] = 1  # of tuners that had estimators of their own
    journal.save(3, pack({"state": state, "flops": "0.0.9", "torch": "2.5.0"}))
    with pytest.raises(JournalError, match=r"written by flops 0\.0\.9 with torch 2\.5\.0"):
        Snapshots(run, journal).restore()
    journal.close()


def test_what_is_packed_has_no_code(tmp_path) -> None:
    state = {"a": torch.randn(3), "b": [1, 2.5, None, "x", (True, 2**70)], "c": {4: A[0].numpy()}}
    back = unpack(pack(state))
    assert torch.equal(back["a"], state["a"])
    assert back["b"] == state["b"]
    assert torch.equal(back["c"][4], A[0])
    with pytest.raises(TypeError, match="tensors, numbers and strings"):
        pack({"f": print})
    part = torch.zeros(1000, 1000)[:2]  # a view is kept without what it is a view of
    assert len(pack(part)) < 20_000
