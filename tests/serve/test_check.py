"""The first contact with a service: one line, within 3 seconds."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flops.serve.check import check_service
from flops.serve.retry import ServiceError
from tests.support.serving import Server

SLACK = 1.0  # of a busy machine


def contact(url: str, key: str | None = None) -> str:
    """What the first contact says; within 3 seconds, in one line."""
    started = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        check_service(url, key)
    assert time.monotonic() - started < 3 + SLACK
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_service_says_soon_what_is_wrong(tmp_path) -> None:
    said = contact("http://127.0.0.1:9")
    assert "no service answers at http://127.0.0.1:9 (ConnectError)" in said
    assert "--url" in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "Timeout" in contact(f"http://127.0.0.1:{silent.getsockname()[1]}")

    class Web(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Web, directory=tmp_path)) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        said = contact(f"http://127.0.0.1:{web.server_port}")
        web.shutdown()
        thread.join()
    assert "is not a `flops serve` (status 404" in said


def test_check_service_checks_the_key(tmp_path) -> None:
    with Server(tmp_path, key="a key") as keyed:
        check_service(keyed.url, "a key\n")
        check_service(keyed.url + "/", "a key")
        assert "rejects the key (401): pass it with --api-key-env" in contact(keyed.url, "secret")
        assert "secret" not in contact(keyed.url, "secret")
        assert "needs a key" in contact(keyed.url)
