"""The answer store: an answer is paid once, whatever happens."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
import torch

from flops.serve.codec import BINARY
from flops.serve.retry import ServiceError
from flops.serve.store import AnswerStore, RequestCost, StoredAnswer, StoreError
from tests.support.serving import Server, pixels, query, until


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("ledger")) as running:
        yield running


def test_a_key_belongs_to_one_body(server) -> None:
    with server.client() as client:
        name = client.upload(pixels())
        client.score(**vars(query(name, "mine")))
        paid = client.usage()["queries"]
        with pytest.raises(ServiceError, match=r"409.*another body"):
            client.score(**vars(query(name, "mine", seed=1)))
        assert client.usage()["queries"] == paid


def test_concurrent_repeats_are_computed_once(server) -> None:
    with server.client(concurrency=16, attempts=1) as client:
        name = client.upload(pixels())
        before = client.usage()
        with ThreadPoolExecutor(16) as pool:
            asked = [query(name, "together", rows=64, seed=3) for _ in range(16)]
            found = list(pool.map(client.send, asked))
        assert sum(not scores.replayed for scores in found) == 1
        assert all(torch.equal(scores.logits, found[0].logits) for scores in found)
        after = client.usage()
        assert after["requests"] - before["requests"] == 1
        assert after["queries"] - before["queries"] == 64


@pytest.mark.slow
def test_answers_points_and_totals_survive_a_kill(tmp_path) -> None:
    with Server(tmp_path) as server:
        with server.client(attempts=3) as client:
            name = client.upload(pixels())
            first = client.score(**vars(query(name, "kept")))
            # the moment the answer is here, the service dies
            server.kill(signal.SIGKILL)
        server.start()
        with server.client(attempts=3) as client:
            again = client.score(**vars(query(name, "kept")))
            assert again.replayed
            assert torch.equal(again.logits, first.logits)
            assert (again.queries, again.texts, again.images) == (6, 60, 6)
            # the points need not be uploaded again, and a new computation gives the same bits
            fresh = client.score(**vars(query(name, "new")))
            assert not fresh.replayed
            assert torch.equal(fresh.logits, first.logits)
            assert client.usage()["queries"] == 12
            with pytest.raises(ServiceError, match="409"):
                client.score(**vars(query(name, "kept", seed=9)))
        assert server.kill(signal.SIGTERM) == -signal.SIGTERM
        assert not server.ledger.with_name("ledger.sqlite-wal").exists()  # closed in order
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        total = dict(ledger.execute("select name, value from totals").fetchall())
        sums = ledger.execute("select sum(queries), sum(texts), sum(images) from answers")
        assert sums.fetchone() == (total["queries"], total["texts"], total["images"])
    ledger.close()
    assert total["replays"] == 1


def test_no_answer_leaves_before_it_is_in_the_ledger(server) -> None:
    """While somebody else holds the store, the answer is computed, but nobody gets it."""
    with server.client(attempts=1) as client, ThreadPoolExecutor(1) as pool:
        name = client.upload(pixels())
        client.score(**vars(query(name, "warm", seed=20)))
        before = client.usage()["requests"]
        other = sqlite3.connect(server.ledger, isolation_level=None)
        other.execute("begin immediate")
        asked = pool.submit(client.send, query(name, "held", seed=21))
        assert wait([asked], timeout=1.5).not_done
        assert client.usage()["requests"] == before
        other.execute("rollback")
        other.close()
        assert asked.result().queries == 6
        assert client.usage()["requests"] == before + 1


@pytest.mark.slow
def test_whoever_does_not_fit_into_the_queue_is_told_to_come_back(tmp_path) -> None:
    """The store is held, so the first request stays; there is room for one."""
    with (
        Server(tmp_path, "--max-queue", "1") as small,
        small.client(attempts=1) as hasty,
        small.client() as patient,
    ):
        name = hasty.upload(pixels())
        hasty.score(**vars(query(name, "warm", seed=20)))
        other = sqlite3.connect(small.ledger, isolation_level=None)
        other.execute("begin immediate")
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(hasty.send, query(name, "first", seed=21))
            assert wait([first], timeout=0.5).not_done
            with pytest.raises(ServiceError, match="429: 1 requests are in flight"):
                hasty.score(**vars(query(name, "second", seed=22)))
            second = pool.submit(patient.send, query(name, "second", seed=22))
            until(lambda: patient.counts["retries"] > 0)
            other.execute("rollback")
            other.close()
            assert not first.result().replayed
            assert not second.result().replayed


@pytest.mark.slow
def test_a_second_service_may_not_have_the_ledger(server) -> None:
    command = [sys.executable, "-m", "flops", "serve", "--port", "0"]
    found = subprocess.run(
        [*command, "--ledger", str(server.ledger)], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 1
    assert "is in use by another service" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_only_the_owner_reads_the_ledger(server, tmp_path) -> None:
    with server.client() as client:
        client.upload(pixels())
    files = sorted(server.ledger.parent.glob("ledger.sqlite*"))
    assert {path.suffix for path in files} >= {".sqlite", ".sqlite-wal", ".sqlite-shm"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    AnswerStore(tmp_path / "old.sqlite", "one").close()
    (tmp_path / "old.sqlite").chmod(0o644)  # of an earlier version
    AnswerStore(tmp_path / "old.sqlite", "one").close()
    assert (tmp_path / "old.sqlite").stat().st_mode & 0o777 == 0o600


def flip(path: Path, table: str, name: str) -> None:
    """Another bit in the middle of a body."""
    with sqlite3.connect(path) as ledger:
        key, *_ = (row[1] for row in ledger.execute(f"pragma table_info({table})"))
        chosen = f"from {table} where {key} = ?"
        ((body,),) = ledger.execute(f"select body {chosen}", [name]).fetchall()
        spoilt = bytearray(body)
        spoilt[len(spoilt) // 2] ^= 4
        ledger.execute(f"update {table} set body = ? where {key} = ?", [bytes(spoilt), name])
    ledger.close()


@pytest.mark.slow
def test_what_has_changed_on_disk_is_noticed_and_not_paid_for_again(tmp_path) -> None:
    with Server(tmp_path) as server:
        with server.client(attempts=1) as client:
            name, other = client.upload(pixels()), client.upload(pixels(13))
            first = client.score(**vars(query(name, "flipped")))
            client.score(**vars(query(other, "whole")))
        server.kill(signal.SIGTERM)
        flip(server.ledger, "answers", "flipped")
        flip(server.ledger, "points", other)
        server.start()
        with server.client(attempts=1) as client:
            again = client.score(**vars(query(name, "flipped")))
            assert torch.equal(again.logits, first.logits)
            assert again.replayed  # computed again, and free
            assert client.usage()["queries"] == 12
            assert client.score(**vars(query(name, "flipped"))).replayed
            assert client.score(**vars(query(other, "whole"))).replayed
            with pytest.raises(ServiceError, match=r"404.*upload them"):
                client.score(**vars(query(other, "new", seed=1)))
            assert client.upload(pixels(13)) == other
            assert client.score(**vars(query(other, "new", seed=1))).queries == 6
        assert server.log().count("the answer flipped in the store is damaged") == 1
    assert "Traceback" not in server.log()


def test_a_ledger_without_checksums_gets_them(tmp_path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = AnswerStore(path, "one")
    ledger.keep([kept("a"), kept("b")], lambda error: None)
    ledger.close()
    with sqlite3.connect(path) as old:
        old.execute("alter table answers drop column checksum")
    old.close()
    ledger = AnswerStore(path, "one")
    assert ledger.find("a") == kept("a")
    ledger.close()
    ledger = AnswerStore(path, "one")
    assert ledger.find("b") == kept("b")
    ledger.close()


def test_a_full_ledger_refuses_what_is_new_and_gives_what_it_has(tmp_path) -> None:
    with Server(tmp_path, "--max-ledger", "1") as server, server.client(attempts=1) as client:
        name = client.upload(pixels())
        first = client.score(**vars(query(name, "first")))
        client.upload(pixels(2000))  # 1.5 megabytes
        with pytest.raises(ServiceError, match=r"507.*--max-ledger"):
            client.score(**vars(query(name, "second", seed=1)))
        with pytest.raises(ServiceError, match=r"507.*--max-ledger"):
            client.upload(pixels(3))
        again = client.score(**vars(query(name, "first")))
        assert again.replayed
        assert torch.equal(again.logits, first.logits)
        assert client.usage()["queries"] == 6


def test_a_full_disk_is_survived(tmp_path) -> None:
    """No file of the service may grow any more; then they may again."""
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("this system cannot limit another process")
    with Server(tmp_path) as server, server.client(attempts=1) as client:
        name = client.upload(pixels())
        first = client.score(**vars(query(name, "first")))
        pid, free = server.process.pid, resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.ledger.stat().st_size, free[1]))
        lines = len(server.log().splitlines())
        for number in range(3):
            with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
                asked = query(name, f"full-{number}", seed=1 + number)
                headers = {"Content-Type": BINARY, "Idempotency-Key": asked.key}
                answer = http.post("/v1/score", content=asked.body(), headers=headers)
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1"
            assert client.score(**vars(query(name, "first"))).replayed
        with pytest.raises(ServiceError, match="503"):
            client.upload(pixels(5))
        assert len(server.log().splitlines()) == lines + 1
        resource.prlimit(pid, resource.RLIMIT_FSIZE, free)
        assert not client.score(**vars(query(name, "full-0", seed=1))).replayed
        assert torch.equal(client.score(**vars(query(name, "first"))).logits, first.logits)
        assert client.usage()["queries"] == 12
        assert "can be written again" in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_ledger_that_is_no_database_any_more_is_no_crash(tmp_path) -> None:
    with Server(tmp_path) as server:
        with server.client(attempts=1) as client:
            name = client.upload(pixels(2000))
            client.score(**vars(query(name, "first")))
        server.kill(signal.SIGTERM)
        data = bytearray(server.ledger.read_bytes())
        with sqlite3.connect(server.ledger) as ledger:
            (page,) = ledger.execute(
                "select rootpage from sqlite_master where name = 'answers'"
            ).fetchone()
            (size,) = ledger.execute("pragma page_size").fetchone()
        ledger.close()
        data[(page - 1) * size : page * size] = bytes([255]) * size
        server.ledger.write_bytes(data)
        server.start()
        with server.client(attempts=1) as client:
            with pytest.raises(ServiceError, match=r"503: the answer store cannot be read"):
                client.score(**vars(query(name, "first")))
            assert client.info()["classes"]
    assert "Traceback" not in server.log()


def kept(key: str) -> StoredAnswer:
    return StoredAnswer(key, "d", b"logits", RequestCost(2, 20, 2))


def test_a_ledger_of_another_model_is_refused(tmp_path) -> None:
    path = tmp_path / "deep" / "ledger.sqlite"
    AnswerStore(path, "one").close()
    with pytest.raises(StoreError, match="another model"):
        AnswerStore(path, "two")
    AnswerStore(path, "one").close()
    other = tmp_path / "text"
    other.write_text("this is no database, whatever its name may be")
    with pytest.raises(StoreError, match="cannot be opened"):
        AnswerStore(other, "one")


def test_an_answer_that_cannot_be_written_is_reported_and_not_kept(tmp_path) -> None:
    """The second has the key of the first: the whole group is undone."""
    ledger = AnswerStore(tmp_path / "ledger.sqlite", "one")
    errors: list[Exception | None] = []
    ledger.keep([kept("a")], errors.append)
    ledger.keep([kept("b"), kept("b")], errors.append)
    ledger.keep([kept("c")], errors.append)
    ledger.close()
    assert len(errors) == 3
    assert isinstance(errors[1], sqlite3.Error)
    reopened = AnswerStore(tmp_path / "ledger.sqlite", "one")
    held = [key for key in "abc" if reopened.find(key)]
    assert "b" not in held
    assert held == [key for key, error in zip("abc", errors, strict=True) if error is None]
    assert reopened.usage()["queries"] == 2 * len(held)
    reopened.close()
