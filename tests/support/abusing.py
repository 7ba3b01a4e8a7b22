"""Requests that cost a service much, and whether it answers others meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from flops.serve.codec import JSON
from tests.support.serving import Server


@contextmanager
def healthy(server: Server, within: float = 1.0) -> Iterator[None]:
    """Health is asked all the time, and always answers in time.

    On a machine that is busy with other things that is longer: twenty times what it takes before.
    """
    times: list[float] = []
    done = threading.Event()

    def ask(client: httpx.Client) -> float:
        started = time.monotonic()
        assert client.get("/v1/health").status_code == 200
        return time.monotonic() - started

    def keep_asking() -> None:
        while not times or not done.is_set():
            times.append(ask(client))
            time.sleep(0.02)

    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        calm = max(ask(client) for _ in range(20))
        thread = threading.Thread(target=keep_asking)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
    assert times
    assert max(times) < within + 20 * calm


def json_bodies(size: int) -> dict[str, bytes]:
    """JSON of about this many bytes that is cheap to send and expensive to build."""

    def field(value: bytes) -> bytes:
        return b'{"points": "' + b"0" * 64 + b'", "rows": [0], "text": [' + value + b"]}"

    return {
        "lists": field(b",".join([b"[[0]]"] * (size // 6))),
        "empty": field(b",".join([b"[]"] * (size // 3))),
        "words": field(b",".join([b'"a"'] * (size // 4))),
        "names": b"{" + b",".join(b'"%d":0' % i for i in range(size // 10)) + b"}",
        "deep": b"[" * size,
        "deep objects": b'{"a":' * (size // 5),
        "digits": field(b"9" * size),
    }


def send_json(server: Server, body: bytes) -> httpx.Response:
    headers = {"Content-Type": JSON, "Idempotency-Key": "json"}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        return client.post("/v1/score", content=body, headers=headers)
