"""Whoever sends nonsense, too much, too slowly or too often does not keep others from answers."""

from __future__ import annotations

import http.client
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from flops.serve import http_limits
from flops.serve.codec import BINARY, WireError
from flops.serve.limits import WrongKeyLimit
from flops.serve.schema import ELEMENTS
from tests.support.abusing import healthy, json_bodies, send_json
from tests.support.serving import Server, pixels, query, until

IDLE = int(os.environ.get("FLOPS_TEST_IDLE", "2000"))
KEY = "a secret, of the tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("abuse")
    with Server(folder, "--rate", "0", "--timeout", "1.5") as running:
        yield running
        assert running.process.poll() is None, "it died"
    assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[Server]:
    """With a key, reachable from elsewhere, and with few file descriptors."""
    folder = tmp_path_factory.mktemp("keyed")
    with Server(folder, "--host", "0.0.0.0", key=KEY, descriptors=300) as running:
        running.url = running.url.replace("0.0.0.0", "127.0.0.1")
        yield running
    assert "Traceback" not in running.log()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("size", [500_000, 1_000_000, 31_000_000])
def test_json_cannot_take_time_or_memory(size, server) -> None:
    before = server.resident()
    for name, body in json_bodies(size).items():
        with healthy(server):
            started = time.monotonic()
            answer = send_json(server, body)
        many = len(body) > 2**20 or sum(body.count(mark) for mark in b",[{") > ELEMENTS
        assert answer.status_code in ((413,) if many else (400, 422)), (name, answer.text)
        assert set(answer.json()) == {"error"}
        assert time.monotonic() - started < 5, name
    assert server.resident() - before < 100 * 2**20


def test_a_head_that_never_ends_has_a_deadline(server) -> None:
    with connect(server) as silent, connect(server) as slow:
        started = time.monotonic()
        slow.sendall(b"GET /v1/health HTTP/1.1\r\n")
        for _ in range(4):  # a byte now and then does not help
            time.sleep(0.3)
            slow.sendall(b"X")
        assert b" 408 " in read_all(silent)
        assert b" 408 " in read_all(slow)
        assert time.monotonic() - started < 5


def status(connection: socket.socket) -> int:
    """Of the next answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """The least of a service."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_both_parsers_of_http_are_guarded(parser, monkeypatch) -> None:
    if parser == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    protocol = http_limits.limited_protocol(0.3, 3)
    assert any(parser in base.__module__ for base in protocol.__mro__)
    config = uvicorn.Config(hello, http=protocol, lifespan="off", log_level="critical")
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        address = listener.getsockname()
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        stack.callback(thread.join)  # also if the test fails
        stack.callback(setattr, running, "should_exit", True)
        until(lambda: running.started)
        first, *others = (
            stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(4)
        )
        assert read_all(first) == b""  # one more than may be
        others[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(others[0]) == 200
        others[1].sendall(b"GET / HTTP")
        assert b" 408 " in read_all(others[1])
        assert b" 408 " in read_all(others[2])


def test_a_kept_connection_has_a_deadline_for_the_next_head_only(server) -> None:
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status(connection) == 200
            time.sleep(0.8)
        time.sleep(1.5)  # idle for longer than a head may take
        connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(connection) == 200
        connection.sendall(b"GET ")
        assert b" 408 " in read_all(connection)


def head(length: int, key: str = "k") -> bytes:
    return (
        f"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: {BINARY}\r\n"
        f"Idempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_a_slow_body_has_a_deadline(server) -> None:
    with connect(server) as connection:
        connection.sendall(head(1000) + b"x")
        assert b" 408 " in read_all(connection)


def test_an_aborted_body_is_one_line_in_the_log(server) -> None:
    before = len(server.log().splitlines())
    with connect(server) as connection:
        connection.sendall(head(1000) + b"x" * 10)
        time.sleep(0.2)
    time.sleep(0.5)
    lines = server.log().splitlines()[before:]
    assert len(lines) == 1, lines
    assert "POST /v1/score: the client disconnected" in lines[0]


def test_pipelined_requests_are_answered_in_order(server) -> None:
    health = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
    missing = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
    bad = head(3) + b"abc"
    expected = [b"200", b"404", b"400", b"200", b"400", b"404"]
    for end in (False, True):
        with connect(server) as connection:
            connection.sendall(health + missing + bad + health + bad + missing)
            if end:
                connection.shutdown(socket.SHUT_WR)
            else:
                time.sleep(1)
                connection.sendall(b"!\r\n\r\n")  # no HTTP: the connection ends
            lines = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert [line[:3] for line in lines][:6] == expected, (end, lines)


def test_a_flood_of_pipelined_requests_is_cut_cleanly(server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert 1 < len(answers) < 2000
    assert all(answer.startswith(b"200") for answer in answers)
    assert b"connection: close" in answers[-1]


def test_wrong_keys_are_limited_by_address_before_the_key_is_looked_at() -> None:
    limit = WrongKeyLimit(rate=1, burst=3)
    for _ in range(3):
        limit.check("10.0.0.1")
        limit.count("10.0.0.1")
    with pytest.raises(WireError, match="too many wrong keys") as caught:
        limit.check("10.0.0.1")
    assert caught.value.status == 429
    limit.check("10.0.0.2")
    for last in range(3):
        limit.count(f"2001:db8::{last + 1}")
    with pytest.raises(WireError):
        limit.check("2001:db8::ffff")  # one network


def test_wrong_keys_are_limited_and_pages_want_the_key(keyed) -> None:
    with httpx.Client(base_url=keyed.url, trust_env=False) as client:
        right = {"Authorization": f"Bearer {KEY}"}
        for page in ("/docs", "/openapi.json"):
            assert client.get(page).status_code == 401
            assert client.get(page, headers=right).status_code == 200
        statuses, shown, started = [], [], time.monotonic()
        while time.monotonic() - started < 1.5 or (429 not in shown and len(statuses) < 1000):
            wrong = {"Authorization": f"Bearer {len(statuses)}"}
            answer = client.get("/v1/info", headers=wrong)
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "1"
                shown.append(client.get("/v1/info", headers=right).status_code)
        seconds = time.monotonic() - started
        assert set(statuses) == {401, 429}
        assert statuses.count(401) <= 40 + 5 * seconds
        # A guess that is right is refused as well, or a flood of guesses would find it.
        assert 429 in shown
        # right keys from the same address wait as well, a moment
        with keyed.client() as patient:
            assert patient.info()["classes"]


def idle(server: Server, count: int, begin: bytes) -> None:
    """Others are served while so many connections do nothing."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count + 200), hard), hard))
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(connect(server))
            with suppress(OSError):  # closed already: that is allowed
                connection.sendall(begin)
        started = time.monotonic()
        with healthy(server, within=2.0), server.client(attempts=3, timeout=10.0) as client:
            name = client.upload(pixels())
            key = f"idle-{count}-{len(begin)}"
            assert client.score(**vars(query(name, key))).queries == 6
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "begin", [b"", b"GET /v1/hea", b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_idle_connections_shut_nobody_out(begin, keyed) -> None:
    """More than the process may have open files: the longest idle ones are closed."""
    idle(keyed, 350, begin)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [b"", b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_two_thousand_idle_connections_shut_nobody_out(begin, tmp_path) -> None:
    with Server(tmp_path) as running:
        idle(running, IDLE, begin)
    assert "Traceback" not in running.log()
