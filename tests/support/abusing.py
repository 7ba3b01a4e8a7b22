"""Requests that cost a service much, and whether it answers others meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from flops.serve.codec import JSON
from tests.support.serving import Server

# In a process of its own: a thread would also wait for what this process does itself, such as
# making a body of 31 megabytes in one call.
_PROBE = """
import http.client, sys, threading, time

def ask():
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    started = time.monotonic()
    connection.request("GET", "/v1/health")
    assert connection.getresponse().status == 200
    connection.close()
    return time.monotonic() - started

calm = max(ask() for _ in range(20))
print("calm", flush=True)
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
times = []
while not times or not done.is_set():
    times.append(ask())
    time.sleep(0.02)
print(calm, max(times))
"""


@contextmanager
def healthy(server: Server, within: float = 1.0) -> Iterator[None]:
    """Health is asked all the time, and always answers in time.

    On a machine that is busy with other things that is longer: twenty times what it takes before.
    """
    command = [sys.executable, "-S", "-c", _PROBE, str(server.port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "calm\n"
        try:
            yield
        finally:
            found, _ = probe.communicate()
    assert probe.returncode == 0
    calm, longest = map(float, found.split())
    assert longest < within + 20 * calm


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
