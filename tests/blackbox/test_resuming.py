"""What a journal keeps for a run that goes on elsewhere, and what it does when a disk fails."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flops import SPSA, LikelihoodRatio, Shaping
from flops.allocators import Gaussian, Neyman
from flops.blackbox import Candidates, Tuner
from flops.blackbox.ask_tell import AskTell, Work
from flops.blackbox.cma import CMAES
from flops.blackbox.evaluator import Evaluator, drive
from flops.blackbox.journal import (
    Journal,
    JournalError,
    Request,
    Response,
    Signature,
    pack,
    unpack,
)
from flops.blackbox.outputs import Outputs
from flops.blackbox.snapshots import Snapshots
from flops.blackbox.tuning import SplitIndices, Tuning
from flops.subspace import step as shaped_step
from flops.subspace.basis import leading

N, D = 8, 12
A = torch.randn(N, 3, D, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3


def logits(parameters: Tensor, points: Tensor) -> Tensor:
    scores = torch.einsum("qkd,qd->qk", A[points], parameters)
    losses = torch.nn.functional.cross_entropy(scores, LABELS[points], reduction="none")
    return torch.cat([losses.unsqueeze(1), (losses < 1).float().unsqueeze(1), scores], 1)


class Service:
    """Takes bytes under keys, charges each key once, and refuses other bytes under it."""

    def __init__(self, breaks: int = 10**9) -> None:
        self.ledger: dict[str, tuple[bytes, Response]] = {}
        self.breaks, self.charged, self.lock = breaks, 0, threading.Lock()

    def prepare(self, candidates: Candidates, key: str) -> list[Request]:
        values = candidates.parameters.contiguous().numpy().tobytes()
        return [Request(key, values + candidates.points.numpy().tobytes())]

    def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
        (request,) = requests
        with self.lock:
            self.breaks -= 1
            if request.key in self.ledger:
                body, answer = self.ledger[request.key]
                if body != request.body:
                    raise ValueError(f"409: {request.key} was used for another body")
                return Response(answer.columns, {"replays": 1})
            values = torch.frombuffer(bytearray(request.body), dtype=torch.float32)
            parameters = values[: len(candidates) * D].reshape(-1, D)
            answer = Response(logits(parameters, candidates.points), {"replays": 0})
            self.charged += len(candidates)
            self.ledger[request.key] = (request.body, answer)
            if self.breaks < 0:  # it was computed and charged, and never arrives
                raise ConnectionError
            return answer


ESTIMATORS: dict[str, Any] = {
    "lr": {"estimator": LikelihoodRatio(0.1)},
    "spsa, learning": {"estimator": SPSA(0.1), "allocator": Gaussian()},
    "pilot": {"estimator": LikelihoodRatio(0.1), "allocator": Neyman(pilot=2)},
    "shaped": {"estimator": LikelihoodRatio(0.1, shaping=Shaping()), "allocator": Neyman()},
    "outputs": {
        "estimator": LikelihoodRatio(0.1, shaping=Shaping()),
        "allocator": Gaussian(),
        "outputs": Outputs(
            lambda columns: columns[:, 2:],
            lambda outputs, points: torch.nn.functional.cross_entropy(
                outputs, LABELS[points], reduction="none"
            ),
        ),
    },
    "cma-es": {},
}


def make(kind: str, epochs: int = 6) -> Tuning:
    start, points = torch.zeros(D), torch.arange(N)
    steps: Any
    if kind == "cma-es":
        steps = CMAES(start, N, sigma=0.3, batch=4, population=5)
    else:
        steps = Tuner(start, N, queries=6, batch=4, learning_rate=0.1, **ESTIMATORS[kind])
    embeds = kind in ("spsa, learning", "outputs")

    def embed(found: Tensor) -> None:
        steps.embeddings = found

    split = SplitIndices(points, points, points)
    return Tuning(steps, start, split, epochs, 0, None, embed if embeds else None)


def end(path: Path | str, kind: str, service: Any) -> Tuning:
    """Run it, with a snapshot at every pause, until it is done or fails."""
    run, journal = make(kind), Journal(path, {"kind": kind})
    try:
        drive(run, Evaluator(service, journal, part=5, concurrency=2), share=1e9)
    finally:
        journal.close()
    return run


def parted(kind: str, path: Path, nudge: bool) -> tuple[Tuning, Service, int]:
    """Broken off after a few answers, again and again; ``nudge``: with other roundings each time.

    Roundings are changed in what the tuner computes: its parameters, whenever it asks.
    """
    service, starts, source = Service(), 0, random.Random(1)
    original = Candidates.__init__

    def nudged(self: Candidates, parameters: Tensor, points: Tensor, kind: str = "query") -> None:
        object.__setattr__(self, "parameters", parameters * (1 + starts * 2e-7))
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "kind", kind)

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
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from tests.blackbox.test_resuming import Service, Candidates, torch, D
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


def test_snapshots_are_few_and_the_journal_stays_small(tmp_path) -> None:
    path = tmp_path / "journal"
    run = end(path, "lr", Service())
    with closing(sqlite3.connect(path)) as base:
        kept = base.execute("select distinct question from snapshots").fetchall()
        oldest = base.execute("select min(question), count(*) from answers").fetchone()
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


def test_a_snapshot_of_another_state_version_names_who_wrote_it(tmp_path) -> None:
    run, journal = make("lr"), Journal(tmp_path / "journal", {})
    state = run.state_dict()
    state["stepper"]["schema"] = 1  # of tuners that had estimators of their own
    journal.save(3, pack({"state": state, "flops": "0.0.9", "torch": "2.5.0"}))
    with pytest.raises(JournalError, match=r"written by flops 0\.0\.9 with torch 2\.5\.0"):
        Snapshots(run, journal).restore()
    journal.close()


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal, JournalError
from tests.blackbox.test_resuming import Service, Candidates, torch, D
def say(message): print("said", message, flush=True)
journal = Journal(sys.argv[1], {}, say, patience=float(sys.argv[3]))
evaluator = Evaluator(Service(), journal, part=64)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for n in range(200):
    if n == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    if n == 4 and len(sys.argv) > 4:  # somebody makes room
        import threading
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        threading.Timer(2, resource.setrlimit, (resource.RLIMIT_FSIZE, unlimited)).start()
    try:
        evaluator.evaluate(Candidates(torch.full((64, D), float(n)), torch.zeros(64).long()))
    except JournalError as error:
        print("stopped", error)
        break
    print("answered", n, flush=True)
"""


def full(path: Path, *options: str) -> list[str]:
    resource = pytest.importorskip("resource")
    assert resource
    root = str(Path(__file__).parents[2])
    arguments = [sys.executable, "-c", FULL, str(path), root, *options]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_full_disk_is_waited_for_and_then_said_in_a_sentence(tmp_path) -> None:
    path = tmp_path / "journal"
    said = full(path, "1")
    answered = [line for line in said if line.startswith("answered")]
    assert 4 <= len(answered) < 200
    assert sum(line.startswith("said the journal") for line in said) == 1
    assert said[-1].startswith("stopped the journal")
    assert "free some space" in said[-1]
    assert "nothing is charged twice" in said[-1]
    journal = Journal(path, {})
    assert journal.paid()["queries"] >= 64 * len(answered)
    service = Service()
    evaluator = Evaluator(service, journal, part=64)
    for n in range(len(answered) + 1):  # it goes on
        evaluator.evaluate(Candidates(torch.full((64, D), float(n)), torch.zeros(64).long()))
    assert service.charged <= 64
    journal.close()


def test_a_disk_that_was_full_for_a_while_changes_nothing(tmp_path) -> None:
    said = full(tmp_path / "journal", "60", "makes room")
    assert sum(line.startswith("answered") for line in said) == 200
    assert sum(line.startswith("said") for line in said) == 1


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
