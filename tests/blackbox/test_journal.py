"""The journal: answers are on the disk before they are used, and asked for once."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info
from torch import Tensor

from flops import LikelihoodRatio
from flops.blackbox import Candidates, Tuner
from flops.blackbox.ask_tell import AskTell, Work
from flops.blackbox.drive import drive
from flops.blackbox.evaluator import BudgetError, Evaluator
from flops.blackbox.journal import Journal, JournalError, Response
from flops.blackbox.objective import ObjectiveError
from flops.blackbox.tuning import SplitIndices, Tuning
from tests.support.asked import Asked, candidates

SETTINGS = {"method": "lr", "seed": 3, "sizes": (4, 5), "budget": None}


def recorded_in(journal: Journal, number: int) -> dict[int, Response]:
    return journal.read(number).responses


@pytest.mark.bits
def test_answers_survive_bit_by_bit(tmp_path) -> None:
    columns = torch.randn(4, 3)
    columns[0, 1] = float("nan")  # other columns may be
    journal = Journal(tmp_path / "deep" / "journal.sqlite", SETTINGS)
    journal.write(2, responses={1: Response(columns, {"texts": 7})})
    journal.count("retries", 2)
    journal.count("retries", 3)
    name = journal.run
    journal.close()
    again = Journal(tmp_path / "deep" / "journal.sqlite", SETTINGS)
    assert again.run == name
    answer = recorded_in(again, 2)[1]
    assert torch.equal(answer.columns.view(torch.int32), columns.view(torch.int32))
    assert answer.cost == {"texts": 7}
    assert recorded_in(again, 1) == {}
    assert again.counters() == {"retries": 5}
    assert again.paid() == {"queries": 4, "answers": 1, "texts": 7}
    with pytest.raises(JournalError, match="UNIQUE"):  # an answer is never replaced
        again.write(2, responses={1: Response(columns)})
    assert again.paid()["queries"] == 4
    again.close()


def test_runs_have_names_of_their_own(tmp_path) -> None:
    names = []
    for name in ("a", "b"):
        journal = Journal(tmp_path / name, SETTINGS)
        names.append(journal.run)
        journal.close()
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"method": "spsa"}, "method was 'lr', is 'spsa'"),
        ({"sizes": (4, 6)}, r"sizes was \[4, 5\], is \[4, 6\]"),
        ({"budget": 100}, "budget was None, is 100"),
        ({"new": 1}, "new was not set, is 1"),
    ],
)
def test_other_settings_are_refused(change, message, tmp_path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path, SETTINGS).close()
    Journal(path, dict(reversed(SETTINGS.items()))).close()
    with pytest.raises(JournalError, match=message) as caught:
        Journal(path, SETTINGS | change)
    assert str(path) in str(caught.value)
    assert "another folder" in str(caught.value)
    Journal(path, SETTINGS).close()  # it was let go of, and not changed


def test_files_that_are_no_journals_are_refused(tmp_path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a data base, but long enough to be read as one" * 50)
    with pytest.raises(JournalError, match=r"journal.sqlite: it cannot be read \(file is not"):
        Journal(path, SETTINGS)
    path.unlink()
    Journal(path, SETTINGS).close()
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("update about set value = '99' where name = 'schema'")
    with pytest.raises(JournalError, match=r"schema 99, written by flops 0.*reads schema 3"):
        Journal(path, SETTINGS)


HOLD = """
import sys, time
from flops.blackbox.journal import Journal, Response
import torch
journal = Journal(sys.argv[1], {})
for number in range(int(sys.argv[2])):
    journal.write(number, responses={0: Response(torch.full((3, 1), float(number)))})
    print(number, flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_and_what_was_written_is_there_after_a_kill(tmp_path) -> None:
    path = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", HOLD, str(path), "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        for number in range(5):
            assert holder.stdout.readline() == f"{number}\n"
        with pytest.raises(JournalError, match="in use by another process"):
            Journal(path, {})
        holder.send_signal(signal.SIGKILL)
    with closing(sqlite3.connect(path)) as base:  # no help from the one that wrote it
        assert base.execute("select count(*), sum(count) from answers").fetchone() == (5, 15)
    journal = Journal(path, {})  # the lock went with the process
    assert torch.equal(recorded_in(journal, 4)[0].columns, torch.full((3, 1), 4.0))
    journal.close()


def test_an_answer_is_on_the_disk_before_it_is_used(tmp_path) -> None:
    """Killed inside `tell`, that is while the answer is used."""
    code = f"""
import os, signal, sys, torch
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from tests.support.asked import Asked, candidates
journal = Journal(sys.argv[1], {{}})
Evaluator(Asked(), journal, part=4).evaluate(candidates())
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "journal.sqlite"
    died = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert died.returncode == -signal.SIGKILL
    with closing(sqlite3.connect(path)) as base:
        found = base.execute("select part, count from answers order by part").fetchall()
    assert found == [(0, 4), (1, 4), (2, 2)]
    asked, journal = Asked(), Journal(path, {})
    columns = Evaluator(asked, journal, part=4).evaluate(candidates())
    assert asked.keys == []
    assert torch.equal(columns[:, 0], 0.75 + torch.arange(10))
    journal.close()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_parts_are_kept_when_another_fails_and_only_those_missing_are_asked(
    concurrency, tmp_path
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, SETTINGS)
    broken = Asked(frozenset({5}))
    evaluator = Evaluator(broken, journal, part=2, concurrency=concurrency)
    with pytest.raises(ConnectionError, match=f"no answer to {journal.run}-0-2"):
        evaluator.evaluate(candidates())
    kept = set(recorded_in(journal, 0))
    assert {0, 1} <= kept
    assert 2 not in kept
    assert len(broken.keys) == len(kept) + 1  # whatever was answered is kept
    name = journal.run
    journal.close()
    journal, whole = Journal(path, SETTINGS), Asked()
    columns = Evaluator(whole, journal, part=2, concurrency=concurrency).evaluate(candidates())
    assert sorted(whole.keys) == [f"{name}-0-{place}" for place in range(5) if place not in kept]
    assert torch.equal(columns[:, 0], 0.75 + torch.arange(10))
    assert torch.equal(columns[:, 1], (columns[:, 0] > 3).float())
    assert journal.paid() == {"queries": 10, "answers": 5, "texts": 20}
    journal.close()


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 2])
def test_requests_are_made_with_the_threads_of_the_run(threads) -> None:
    """A new thread has the number of the environment: sums in it would round differently."""

    def now() -> dict[str, int]:
        return {library["filepath"]: library["num_threads"] for library in threadpool_info()}

    def objective(parameters: Tensor, points: Tensor) -> Tensor:
        seen.append(now())
        return torch.zeros(len(points))

    seen: list[dict[str, int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = now()
        Evaluator(objective, Journal(":memory:", {}), part=2, concurrency=2).evaluate(candidates())
    finally:
        torch.set_num_threads(before)
    assert threads in expected.values()
    assert seen == [expected] * 5


def test_another_question_in_the_same_place_is_refused(tmp_path) -> None:
    journal = Journal(":memory:", SETTINGS)
    Evaluator(Asked(), journal, part=4).evaluate(candidates())
    flipped = Candidates(torch.full((10, 3), 0.5), torch.arange(10).flip(0))
    validation = Candidates(torch.full((10, 3), 0.5), torch.arange(10), "validation")
    for other, now in (
        (candidates(9), "'query' of 9 rows"),
        (flipped, "'query' of 10 rows .of other points"),
        (validation, "'validation' of 10 rows"),
    ):
        asked = Asked()
        with pytest.raises(JournalError, match=f"round 0 was 'query' of 10 rows .*{now}.*lost"):
            Evaluator(asked, journal, part=4).evaluate(other)
        assert asked.keys == []
    asked = Asked()
    with pytest.raises(JournalError, match=r"round 0 was of 3 parts or more .* now of 2"):
        Evaluator(asked, journal, part=8).evaluate(candidates())
    assert asked.keys == []
    # Other last bits are the same candidates: another machine rounds otherwise.
    columns = Evaluator(asked, journal, part=4).evaluate(candidates(value=0.5 + 1e-7))
    assert asked.keys == []
    assert torch.equal(columns[:, 0], 0.75 + torch.arange(10))


def test_the_budget_is_a_hard_cap_that_also_counts_what_is_in_the_journal() -> None:
    journal, asked, told = Journal(":memory:", SETTINGS), Asked(), []
    evaluator = Evaluator(asked, journal, budget=25, part=4, notify=told.append)
    evaluator.evaluate(candidates())
    evaluator.evaluate(candidates())
    with pytest.raises(BudgetError, match="25 queries does not cover 10 more after 20"):
        evaluator.evaluate(candidates())
    assert len(asked.rows) == sum(told) == 20
    evaluator.evaluate(candidates(5))  # to the last one
    assert len(asked.rows) == evaluator.rows == 25
    with pytest.raises(BudgetError):
        evaluator.evaluate(candidates(1))
    more = Asked()
    resumed = Evaluator(more, journal, budget=25, part=4)
    for rows in (10, 10, 5):
        resumed.evaluate(candidates(rows))
    with pytest.raises(BudgetError):
        resumed.evaluate(candidates(1))
    assert more.rows == []


def test_bad_answers_are_refused_before_they_are_kept() -> None:
    journal = Journal(":memory:", SETTINGS)

    def bad(parameters: Tensor, points: Tensor) -> Tensor:
        return torch.full((len(points),), float("nan"))

    with pytest.raises(ObjectiveError, match="not finite for 4 of 4 rows"):
        Evaluator(bad, journal, part=4).evaluate(candidates())
    assert journal.paid()["queries"] == 0


A = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def plain(parameters: Tensor, points: Tensor) -> Tensor:
    return (parameters - A[points]).square().sum(1)


def tuning(epochs: int = 4, budget: int | None = None, patience: int = 0) -> Tuning:
    """Six points to train on; the same ones to validate and test."""
    estimator = LikelihoodRatio(0.1)
    tuner = Tuner(
        torch.ones(3), points=6, estimator=estimator, queries=4, batch=3, learning_rate=0.1, seed=2
    )
    points = torch.arange(6)
    split = SplitIndices(points, points, points)
    return Tuning(tuner, torch.ones(3), split, epochs, patience, budget)


def test_a_run_that_is_broken_off_anywhere_ends_as_if_it_had_not(tmp_path) -> None:
    whole = tuning()
    drive(whole, Evaluator(plain, Journal(":memory:", {}), part=4))
    total = whole.asked
    assert total == 6 * (1 + 4 + 1) + 4 * 2 * (3 + 12)
    asked: list[int] = []
    for breaks in range(7, 100000, 13):
        left = [breaks]

        def objective(parameters: Tensor, points: Tensor) -> Tensor:
            if left[0] < len(points):
                raise ConnectionError
            left[0] -= len(points)
            asked.append(len(points))
            return plain(parameters, points)

        journal, again = Journal(tmp_path / "journal.sqlite", {}), tuning()
        try:
            drive(again, Evaluator(objective, journal, part=4))
            break
        except ConnectionError:
            assert not again.done
        finally:
            journal.close()
    assert breaks > 20, "it was never broken off"
    assert sum(asked) == total
    assert torch.equal(again.best, whole.best)
    assert str(again.history) == str(whole.history)  # with accuracies that nobody knows
    assert again.test_loss == whole.test_loss
    assert not torch.equal(whole.best, whole.start)


def test_a_run_stops_while_validation_and_test_can_still_be_paid_for() -> None:
    for budget in (12, 27, 41, 42, 43, 60, 100):
        run = tuning(budget=budget)
        drive(run, Evaluator(plain, Journal(":memory:", {}), budget=budget))
        assert run.asked <= budget
        assert run.test_loss == run.test_loss
        assert run.stopped == "budget"
    rich = tuning(budget=10_000)
    drive(rich, Evaluator(plain, Journal(":memory:", {}), budget=10_000))
    assert rich.stopped == "epochs"
    poor, asked = tuning(budget=11), Asked()
    with pytest.raises(BudgetError, match=r"11 queries does not cover one evaluation .* takes 12"):
        drive(poor, Evaluator(asked, Journal(":memory:", {}), budget=11))
    assert asked.rows == []


def test_a_run_without_progress_stops_early_and_tests_what_validated_best() -> None:
    run = tuning(epochs=50, patience=2)

    def worse(parameters: Tensor, points: Tensor) -> Tensor:
        return (parameters - 1).square().sum(1)  # the start is the best there is

    drive(run, Evaluator(worse, Journal(":memory:", {})))
    assert (run.stopped, run.history[-1].epoch) == ("patience", 2)
    assert torch.equal(run.best, run.start)
    assert run.test_loss == 0


def test_whoever_has_asked_everything_says_so() -> None:
    class Once(AskTell):
        def work(self) -> Work[None]:
            yield candidates()

    once = Once()
    once.tell(torch.zeros(len(once.ask())))
    assert once.done
    with pytest.raises(Exception, match="nothing is left to evaluate"):
        once.ask()
