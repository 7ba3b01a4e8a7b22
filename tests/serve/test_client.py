"""The client against real services, also ones that fail in every way we can think of."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from flops.cli.main import main
from flops.errors import FlopsError
from flops.serve.client import ServiceClient
from flops.serve.codec import digest, encode
from flops.serve.credentials import read_key
from flops.serve.retry import RetryPolicy, ServiceError, seconds
from tests.support.faulty_proxy import FAULTS
from tests.support.serving import Server, faulty, pixels, query, until


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("client")) as running:
        yield running


@contextmanager
def canned(reply: Callable[[int], tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list]]:
    """A service that says what it is told to, by number of the request; and when it was asked."""
    asked: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(time.monotonic())
            status, headers, body = reply(len(asked) - 1)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{service.server_port}", asked
        finally:
            service.shutdown()
            thread.join()


def answer(logits: torch.Tensor, key: str = "k") -> tuple[int, dict[str, str], bytes]:
    body = encode({"logits": logits})
    cost = {"X-Flops-Queries": "6", "X-Flops-Texts": "60", "X-Flops-Images": "6"}
    marks = {"X-Flops-Key": key, "X-Flops-Digest": digest(body), "X-Flops-Replayed": "false"}
    return 200, {**cost, **marks}, body


def ask(url: str, **options):
    with ServiceClient(url, timeout=5, **options) as client:
        return client.score(**vars(query("0" * 64, "k"))), client.counts


FAST = {"retries": RetryPolicy(4, initial=0.001)}


def test_answers_arrive_one_by_one_and_repeats_are_free(server) -> None:
    with server.client(concurrency=4) as client:
        name = client.upload(pixels())
        assert client.upload(pixels()) == name
        queries = [query(name, f"many-{i}", rows=1 + i, seed=i) for i in range(9)]
        found = dict(client.send_many(queries))
        assert sorted(found) == list(range(9))
        for i, scores in found.items():
            assert scores.logits.shape == (1 + i, 10)
            assert (scores.queries, scores.images, scores.replayed) == (1 + i, 1 + i, False)
        paid = client.usage()["queries"]
        again = dict(client.send_many(queries))
        assert all(scores.replayed for scores in again.values())
        assert all(torch.equal(again[i].logits, found[i].logits) for i in found)
        assert client.usage()["queries"] == paid
        assert client.counts["replays"] == 9


def test_answers_that_arrived_are_kept_when_another_fails(server) -> None:
    with server.client(concurrency=3) as client:
        name = client.upload(pixels())
        queries = [query(name, f"partial-{i}", seed=i) for i in range(5)]
        queries[2] = query("0" * 64, "partial-2")  # points that are not there
        found = []
        answers = map(found.append, client.send_many(queries))
        with pytest.raises(ServiceError, match="404"):
            list(answers)
        found = [position for position, _ in found]
        assert {0, 1} <= set(found)
        assert 2 not in found


def test_refusals_are_errors_at_once_with_the_message_of_the_service(server) -> None:
    with server.client() as client:
        wrong = vars(query("0" * 64, "wrong")) | {"text": torch.zeros(6, 4, 5)}
        with pytest.raises(ServiceError, match=r"POST .*with the key wrong: 422.*width 64"):
            client.score(**wrong)
        assert client.counts["retries"] == 0
        with pytest.raises(ServiceError, match="letters"):
            client.score(**vars(query("0" * 64, "a key with blanks")))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 418, 422, 301])
def test_other_statuses_are_not_asked_again(status) -> None:
    with canned(lambda _: (status, {}, b'{"error": "no"}')) as (url, asked):
        with pytest.raises(ServiceError, match=f"{status}: no"):
            ask(url, **FAST)
        assert len(asked) == 1


@pytest.mark.parametrize(
    "bad",
    [
        (429, {}, b""),
        (500, {}, b"\xff"),
        (502, {}, b"<html>"),
        (503, {}, b"{}"),
        (504, {}, b"[1]"),
        (200, {}, b""),
        (200, {}, b"hello"),
        answer(torch.zeros(5, 10)),  # rows are missing
        answer(torch.zeros(6, 10), key="another"),
    ],
)
def test_what_may_pass_is_asked_again(bad) -> None:
    good = answer(torch.ones(6, 10))
    with canned(lambda number: good if number == 2 else bad) as (url, asked):
        scores, counts = ask(url, **FAST)
        assert torch.equal(scores.logits, torch.ones(6, 10))
        assert len(asked) == 3
        assert counts == {"requests": 3, "retries": 2, "replays": 0, "answers": 1}
    with canned(lambda _: bad) as (url, asked):
        with pytest.raises(ServiceError, match=f"{url}/v1/score with the key k: no usable answer"):
            ask(url, **FAST)
        assert len(asked) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_answer_that_is_not_finite_is_an_error_at_once(value) -> None:
    with canned(lambda _: answer(torch.full((6, 10), value))) as (url, asked):
        with pytest.raises(ServiceError, match=f"k from {url} has logits that are not finite"):
            ask(url, **FAST)
        assert len(asked) == 1


def test_retry_after_is_waited_for() -> None:
    good = answer(torch.ones(6, 10))
    with canned(lambda n: good if n else (429, {"Retry-After": "1"}, b"")) as (url, asked):
        ask(url, **FAST)
        assert asked[1] - asked[0] >= 1
    assert seconds("7") == 7
    assert seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds("Fri, 31 Dec 2055 23:59:59 GMT") > 3.1e8
    assert seconds("soon") == seconds(None) == seconds("-3") == 0


def test_nobody_there_is_an_error_that_says_where() -> None:
    with pytest.raises(ServiceError, match=r"127.0.0.1:9/v1/score.*4 attempts.*ConnectError"):
        ask("http://127.0.0.1:9", **FAST)
    with pytest.raises(FlopsError, match="must begin with http"):
        ask("gopher://127.0.0.1:9", **FAST)


@pytest.mark.parametrize("key", ["two\nlines of-a-secret", "n\u00f6-ascii-secret", "", "secret\0"])
def test_keys_that_cannot_be_sent_are_refused_and_not_shown(key, tmp_path, monkeypatch) -> None:
    with pytest.raises(FlopsError) as caught:
        ServiceClient("http://127.0.0.1:9", key)
    assert "secret" not in str(caught.value)
    assert "printable ASCII" in str(caught.value)
    (tmp_path / "key").write_text(key, "utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--api-key-file", str(tmp_path / "key")])
    assert "secret" not in str(stopped.value)
    if "\0" not in key:
        monkeypatch.setenv("FLOPS_TEST_KEY", key)
        with pytest.raises(SystemExit) as stopped:
            main(["tune", "--url", "http://127.0.0.1:9", "--api-key-env", "FLOPS_TEST_KEY"])
        assert "secret" not in str(stopped.value)
        assert "FLOPS_TEST_KEY" in str(stopped.value)


def test_blanks_around_a_key_are_no_part_of_it(tmp_path) -> None:
    (tmp_path / "key").write_text("  a key\r\n", "utf-8")
    assert read_key(None, tmp_path / "key") == "a key"
    with pytest.raises(FlopsError, match="pass one of them"):
        read_key("KEY", tmp_path / "key")
    with pytest.raises(FlopsError, match="--api-key-file cannot be read"):
        read_key(None, tmp_path / "none")


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:9", "http://127.0.0.1:9/?key=secret"])
def test_addresses_with_a_password_are_refused_and_not_shown(url, tmp_path) -> None:
    with pytest.raises(FlopsError) as caught:
        ServiceClient(url)
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--url", url, "--output", str(tmp_path / "run")])
    for said in (str(caught.value), str(stopped.value)):
        assert "secret" not in said
        assert "--api-key-env" in said
    assert not (tmp_path / "run").exists()


def test_jitter_is_full_and_leaves_the_global_generators_alone() -> None:
    random.seed(3)
    states = random.getstate(), torch.get_rng_state()
    retries = RetryPolicy(initial=0.1, maximum=2)
    for number, bound in ((0, 0.1), (1, 0.2), (3, 0.8), (9, 2), (5000, 2)):
        draws = [retries.jitter(number) for _ in range(400)]
        assert 0 <= min(draws) < 0.05 * bound
        assert 0.95 * bound < max(draws) <= bound
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_comes_through_a_faulty_network_and_is_paid_once(seed, server) -> None:
    with server.client() as direct:
        name = direct.upload(pixels())
        before = direct.usage()
        queries = [query(name, f"faulty-{seed}-{i}", seed=i) for i in range(40)]
        with faulty(server.port, seed) as (url, done):
            retries = RetryPolicy(60, initial=0.01, maximum=0.2)
            with ServiceClient(url, timeout=2, concurrency=8, retries=retries) as client:
                found = dict(client.send_many(queries))
                assert client.counts["retries"] > 20
            did = done()
        after = direct.usage()
        assert after["requests"] - before["requests"] == 40
        assert after["queries"] - before["queries"] == 240
        assert after["replays"] > before["replays"]  # it was paid for, and the answer was lost
        assert {name for name in FAULTS if did.get(name)} == set(FAULTS)
        for i, asked in enumerate(queries):
            assert torch.equal(direct.score(**vars(asked)).logits, found[i].logits)


@pytest.mark.slow
def test_the_client_carries_on_when_the_service_is_killed_again_and_again(tmp_path) -> None:
    with Server(tmp_path) as server:
        with server.client(
            concurrency=4, retries=RetryPolicy(5000, 0.05, 0.3), timeout=10
        ) as client:
            name = client.upload(pixels())
            queries = [query(name, f"killed-{i}", rows=24, seed=i) for i in range(80)]
            found: dict[int, torch.Tensor] = {}

            def run() -> None:
                for position, scores in client.send_many(queries):
                    found[position] = scores.logits

            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(run)
                for enough in (15, 40):
                    until(lambda: len(found) >= enough or running.done())
                    server.kill(signal.SIGKILL)
                    assert not running.done()
                    server.start()
                running.result()
            assert len(found) == 80
            assert client.counts["retries"] > 0
            usage = client.usage()
            assert (usage["requests"], usage["queries"]) == (80, 80 * 24)
            for i in (0, 20, 50, 79):
                again = client.score(**vars(queries[i]))
                assert again.replayed
                assert torch.equal(again.logits, found[i])
        assert server.kill(signal.SIGTERM) == -signal.SIGTERM
        assert not server.ledger.with_name("ledger.sqlite-wal").exists()  # closed in order
        with sqlite3.connect(server.ledger) as ledger:
            rows = ledger.execute("select count(*), sum(queries) from answers").fetchone()
        ledger.close()
        assert rows == (80, 80 * 24)
