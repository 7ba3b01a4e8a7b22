"""Budgets and epochs of a run that goes on: they say how long it is, and change no question."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flops import SPSA, LikelihoodRatio
from flops.allocators import Gaussian
from flops.blackbox import Tuner
from flops.blackbox.drive import drive
from flops.blackbox.evaluator import BudgetError, Evaluator
from flops.blackbox.journal import Journal, JournalError
from flops.blackbox.tuning import SplitIndices, Tuning
from tests.support.paid import D, N, Paid
from tests.support.tuned_functions import make as make_tuner

POINTS = torch.arange(N)
STEP = 5 + 20  # rows of a step: clean losses and queries of 5 points
EPOCH = 4 * STEP + N


def go(path: Path, service: Paid, share: float = 1e9, **limits) -> tuple[Tuning, Evaluator]:
    """Begin or go on."""
    given = {"epochs": 3, "patience": 0, "budget": None} | limits
    tuner = Tuner(
        torch.zeros(D),
        points=N,
        estimator=LikelihoodRatio(0.1),
        queries=4,
        batch=5,
        learning_rate=0.1,
    )
    run = Tuning(tuner, torch.zeros(D), SplitIndices(POINTS, POINTS, POINTS), **given)
    journal = Journal(path / "run.db", {"kind": "lr"})
    try:
        evaluator = Evaluator(service, journal, given["budget"], part=8)
        drive(run, evaluator, share=share)
        assert journal.paid()["queries"] == evaluator.spent == service.rows
    finally:
        journal.close()
    return run, evaluator


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Tuning:
    folder = tmp_path_factory.mktemp("whole")
    return go(folder, Paid(str(folder / "ledger.db")), epochs=3)[0]


@pytest.mark.parametrize("share", [1e9, 1e-9], ids=["from a snapshot", "from the beginning"])
@pytest.mark.parametrize(
    "limits",
    [
        [{"epochs": 1}, {"epochs": 2}, {"epochs": 3}],
        [{"budget": 2 * N + 1}, {"budget": 150}, {"budget": 333}, {"budget": None}],
        [{"budget": 300, "epochs": 9}, {"patience": 1}, {}],
    ],
    ids=["epochs", "budget", "both"],
)
def test_a_run_that_is_prolonged_is_the_run_that_was_long(limits, share, whole, tmp_path) -> None:
    service, ends = Paid(str(tmp_path / "ledger.db")), 0
    for given in limits:
        run, _ = go(tmp_path, service, share, **given)
        if given.get("budget") is not None:
            assert run.stopped == "budget"
            assert service.rows <= given["budget"]
        ends += 1
    assert run.stopped == "epochs"
    assert torch.equal(run.best, whole.best)
    assert [e.validation_loss for e in run.history] == [e.validation_loss for e in whole.history]
    assert run.test_loss == whole.test_loss
    asked = N + 3 * EPOCH + N
    assert asked < service.rows <= asked + 2 * N * (ends - 1)  # each earlier end, once
    before = service.rows
    go(tmp_path, service, share)  # and again: everything is there
    assert service.rows == before


def test_a_budget_that_is_lowered_uses_what_was_paid_for_and_no_more(tmp_path) -> None:
    service = Paid(str(tmp_path / "ledger.db"))
    long, _ = go(tmp_path, service, epochs=2)
    before = service.rows
    again, _ = go(tmp_path, service, epochs=2, budget=before)
    assert torch.equal(again.best, long.best)
    assert service.rows == before
    for budget in (10, before - 1):
        shorter, _ = go(tmp_path, service, epochs=2, budget=budget)  # its end is recorded
        assert torch.equal(shorter.best, long.best)
    fewer, _ = go(tmp_path, service, epochs=1)
    assert fewer.history[-1].epoch == 2  # there is no way back
    assert service.rows == before


def test_a_budget_below_what_is_spent_says_what_it_takes(tmp_path) -> None:
    class Breaks(Paid):
        def evaluate(self, candidates, key):
            if self.rows >= 200:
                raise ConnectionError
            return super().evaluate(candidates, key)

    with pytest.raises(ConnectionError):
        go(tmp_path, Breaks(str(tmp_path / "ledger.db")))
    service = Paid(str(tmp_path / "ledger.db"))
    before = service.rows
    with pytest.raises(BudgetError, match=r"budget of 100 queries .* give a budget of at least 2"):
        go(tmp_path, service, budget=100)
    assert service.rows == before
    most = before + 2 * N + STEP  # the step that was begun, validation and test
    run, _ = go(tmp_path, service, budget=most)
    assert run.stopped == "budget"
    assert service.rows <= most


def test_a_tuner_goes_on_with_another_budget(tmp_path) -> None:
    rows: list[int] = []

    def objective(parameters: Tensor, points: Tensor) -> Tensor:
        rows.extend(points.tolist())
        return (parameters - 1).square().sum(1)

    def make(budget: int | None, **options) -> Tuner:
        given = {"learning_rate": 0.05, "queries": 6} | options
        return Tuner(
            torch.zeros(3), objective, points=4, journal=tmp_path / "run.db", budget=budget,
            price=2.0, estimator=SPSA(0.1), **given,
        )  # fmt: skip

    for budget, steps in ((100, 3), (60, 3), (200, 7), (None, 10)):
        with make(budget) as tuner:
            for _ in tuner.run(until=10):
                pass
            assert tuner.steps == steps
            assert tuner.spent == len(rows) == 28 * steps
            assert tuner.cost == pytest.approx(28 * steps * 2 / 1000)
    tuner = make(285)
    list(tuner.run(until=10))  # recorded
    with pytest.raises(BudgetError, match="budget of 285 rows does not cover a step of 28"):
        tuner.step()
    tuner.budget = 10_000
    tuner.step()
    assert tuner.steps == 11
    tuner.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.1}, "learning_rate was 0.05, is 0.1"),
        ({"queries": 8, "seed": 3}, "queries was 6, is 8; seed was 0, is 3"),
        ({"estimator": SPSA(0.2)}, "settings: estimator.sigma was 0.1, is 0.2. Continue"),
        ({"allocator": Gaussian()}, "allocator.class was .Equal., is .Gaussian."),
        ({"points": 5}, "points was 4, is 5"),
        ({"part": 7}, "part was 256, is 7"),
    ],
)
def test_a_changed_setting_is_named(change, message, tmp_path) -> None:
    given = {"learning_rate": 0.05, "queries": 6, "estimator": SPSA(0.1), "points": 4}
    Tuner(torch.zeros(3), journal=tmp_path / "run.db", **given).close()
    with pytest.raises(JournalError, match=message):
        Tuner(torch.zeros(3), journal=tmp_path / "run.db", **(given | change))
    with pytest.raises(JournalError, match="start has other values"):
        Tuner(torch.ones(3), journal=tmp_path / "run.db", **given)
    Tuner(torch.zeros(3), journal=tmp_path / "run.db", budget=9, price=1.0, **given).close()


def test_a_journal_without_the_later_tables_is_read(tmp_path) -> None:
    path = tmp_path / "run.db"
    tuner = make_tuner(journal=path)
    list(tuner.run(2))
    tuner.close()
    with closing(sqlite3.connect(path)) as base, base:
        for table in ("kept", "failures"):
            base.execute(f"drop table {table}")
    again = make_tuner(journal=path)
    list(again.run(until=4))
    assert again.failures == []
    whole = make_tuner()
    list(whole.run(4))
    assert torch.equal(again.parameters, whole.parameters)
    again.close()


def test_the_end_of_a_run_of_an_earlier_version_is_paid_for_once(tmp_path, monkeypatch) -> None:
    """It is recorded among the other rounds."""
    service, place = Paid(str(tmp_path / "ledger.db")), Tuning._all

    def earlier(self, parameters, points, kind, ending=False):
        return place(self, parameters, points, kind)

    monkeypatch.setattr(Tuning, "_all", earlier)
    before, _ = go(tmp_path, service, epochs=2)
    monkeypatch.undo()
    rows = service.rows
    again, _ = go(tmp_path, service, epochs=2)
    assert service.rows == rows
    assert again.test_loss == before.test_loss
    with pytest.raises(JournalError, match=r"was 'test' of 20 rows .* now 'clean' .*version \(0"):
        go(tmp_path, service, epochs=3)
    assert service.rows == rows
