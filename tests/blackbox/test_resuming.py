"""Runs that break off anywhere, and go on elsewhere with other roundings."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flops.blackbox import Candidates
from flops.blackbox.ask_tell import AskTell, Work
from flops.blackbox.drive import drive
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal, JournalError, Request, Response
from flops.blackbox.tuning import Tuning
from flops.subspace import step as shaped_step
from flops.subspace.moments import leading
from tests.support.keyed_service import D, Service
from tests.support.small_tunings import ESTIMATORS, end, make


def parted(kind: str, path: Path, nudge: bool) -> tuple[Tuning, Service, int]:
    """Broken off after a few answers, again and again; ``nudge``: with other roundings each time.

    Roundings are changed in what the tuner computes: its parameters, whenever it asks.
    """
    service, starts, source = Service(), 0, random.Random(1)
    original = Candidates.__init__

    def nudged(self: Candidates, parameters: Tensor, *others: Any, **more: Any) -> None:
        made = more.get("round", -1) < 0  # by the tuner, and not a part or a copy
        original(self, parameters * (1 + starts * 2e-7 * made), *others, **more)

    while True:
        service.breaks, starts = source.randint(0, 12), starts + 1
        try:
            if nudge:
                Candidates.__init__ = nudged  # type: ignore[method-assign]
            return end(path, kind, service), service, starts
        except ConnectionError:
            pass
        finally:
            Candidates.__init__ = original  # type: ignore[method-assign]


@pytest.mark.bits
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_run_that_breaks_off_anywhere_ends_with_the_same_bits(kind, tmp_path) -> None:
    whole, one = make(kind), Service()
    drive(whole, Evaluator(one, Journal(":memory:", {}), part=5))
    again, service, starts = parted(kind, tmp_path / "journal", nudge=False)
    assert starts > 5
    assert torch.equal(again.best, whole.best)
    assert not torch.equal(again.best, again.start)
    assert again.history == whole.history
    assert service.charged == one.charged == again.asked


@pytest.mark.bits
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_other_roundings_are_never_refused_nor_paid_for_twice(kind, tmp_path) -> None:
    whole, one = make(kind), Service()
    drive(whole, Evaluator(one, Journal(":memory:", {}), part=5))
    again, service, starts = parted(kind, tmp_path / "journal", nudge=True)
    assert starts > 5
    assert service.charged == one.charged == again.asked
    assert again.stopped == "epochs"
    assert torch.isfinite(again.best).all()


class Chooser(AskTell):
    """Asks as many rows as it decides to: this one's decisions are those of another machine."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.took = rows, [0]

    def work(self) -> Work[None]:
        for _ in range(3):
            rows = self.decide("counts", torch.tensor(self.rows))
            self.took.append(int(rows))
            yield Candidates(torch.zeros(int(rows), D), torch.arange(int(rows)))


def test_decisions_are_made_once(tmp_path) -> None:
    path, service = tmp_path / "journal", Service(breaks=3)
    journal = Journal(path, {})
    with pytest.raises(ConnectionError):
        drive(Chooser(6), Evaluator(service, journal, part=3))
    journal.close()
    service.breaks, other, journal = 10**9, Chooser(4), Journal(path, {})
    drive(other, Evaluator(service, journal, part=3))
    assert other.took[1:] == [6, 6, 4]  # two were asked about before, the third was not
    assert service.charged == 16
    journal.close()
    journal = Journal(path, {})

    class Other(AskTell):
        def work(self) -> Work[None]:
            self.decide("directions", 1)
            yield Candidates(torch.zeros(1, D), torch.arange(1))

    with pytest.raises(JournalError, match=r"round 0 was a decision about counts .* directions"):
        drive(Other(), Evaluator(service, journal))
    journal.close()


@pytest.mark.bits
def test_answers_go_with_the_directions_that_were_asked(tmp_path, monkeypatch) -> None:
    """Eigenvectors of another machine may have other signs."""
    whole = make("shaped", epochs=3)
    drive(whole, Evaluator(Service(), Journal(":memory:", {}), part=5))

    class Breaks(Service):
        def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
            if requests[0].key.endswith("-14-3"):  # in the queries of the last step
                raise ConnectionError
            return super().send(candidates, requests)

    path, service = tmp_path / "journal", Breaks()
    journal = Journal(path, {})
    with pytest.raises(ConnectionError):
        drive(make("shaped", epochs=3), Evaluator(service, journal, part=5), share=1e9)
    journal.close()

    def other(*arguments: Any) -> Any:
        found = leading(*arguments)
        return replace(found, channels=tuple(-c for c in found.channels))

    monkeypatch.setattr(shaped_step, "leading", other)
    again, journal, rest = make("shaped", epochs=3), Journal(path, {}), Service()
    rest.ledger = service.ledger
    drive(again, Evaluator(rest, journal, part=5), share=1e9)
    journal.close()
    assert rest.charged == 9 + 8 + 8  # the rest of that step, validation, test
    assert again.stepper is not None
    assert whole.stepper is not None
    torch.testing.assert_close(
        again.stepper.parameters, whole.stepper.parameters, rtol=0, atol=1e-5
    )


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[2])
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from flops.blackbox.objective import Candidates
from tests.support.keyed_service import D, Service
class Dies(Service):
    def send(self, candidates, requests):
        if requests[0].key.endswith("-0-2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(candidates, requests)
journal = Journal(sys.argv[1], {})
Evaluator(Dies(), journal, part=2).evaluate(Candidates(torch.ones(8, D), torch.arange(8)))
"""


def test_a_request_is_on_the_disk_before_it_is_sent_and_gone_when_it_is_answered(tmp_path) -> None:
    path, root = tmp_path / "journal", str(Path(__file__).parents[2])
    died = subprocess.run([sys.executable, "-c", KILLED, str(path), root], check=False)
    assert died.returncode == -signal.SIGKILL
    with closing(sqlite3.connect(path)) as base:
        found = base.execute("select part, key, body from requests").fetchall()
        assert base.execute("select part from answers order by part").fetchall() == [(0,), (1,)]
    ((part, key, body),) = found
    asked = Candidates(torch.ones(8, D), torch.arange(8))
    assert part == 2
    assert body == Service().prepare(asked.part(4, 6), key)[0].body
    journal, sent = Journal(path, {}), []

    class Records(Service):
        def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
            sent.append((requests[0].key, requests[0].body))
            return super().send(candidates, requests)

    other = Candidates(torch.ones(8, D) + 1e-6, torch.arange(8))  # what it is on another machine
    Evaluator(Records(), journal, part=2).evaluate(other)
    assert sent[0] == (key, body)
    assert [k.rsplit("-", 1)[1] for k, _ in sent] == ["2", "3"]
    assert not journal.read(0).requests
    journal.close()
