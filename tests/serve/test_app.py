"""The HTTP contract of `flops serve`, with a real process: who is let in, and what is refused."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save

from flops.serve.codec import BINARY, JSON, digest, encode
from flops.serve.schema import SCORE, ScoreBody, ScoreRequest
from tests.support.serving import IMAGE, TEXT, Server, pixels, query

KEY = "a secret, of the tests"
BINARY_HEADERS = {"Content-Type": BINARY}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("service"), "--max-body", "1", key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def http_client(server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def points(server) -> str:
    with server.client() as client:
        return client.upload(pixels())


def fields(points: str, key: str = "-", rows: int = 3) -> dict[str, torch.Tensor]:
    asked = query(points, key, rows)
    return {name: getattr(asked, name) for name in SCORE}


def post(client: httpx.Client, body: bytes, key: str, kind: str = BINARY) -> httpx.Response:
    return client.post(
        "/v1/score", content=body, headers={"Content-Type": kind, "Idempotency-Key": key}
    )


def test_every_route_but_health_wants_the_key(server) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/v1/health").json() == {"status": "ok"}
        for header in (None, "Bearer wrong", f"Basic {KEY}", "Bearer", f"Bearer {KEY}x"):
            headers = {} if header is None else {"Authorization": header}
            for method, path in (
                ("GET", "/v1/info"),
                ("GET", "/v1/usage"),
                ("GET", "/v1/metrics"),
                ("PUT", f"/v1/points/{'0' * 64}"),
                ("POST", "/v1/score"),
            ):
                answer = client.request(
                    method, path, headers={**headers, **BINARY_HEADERS, "Idempotency-Key": "k"}
                )
                assert answer.status_code == 401, (method, path, header)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY not in answer.text


def test_info_has_no_weights(http_client) -> None:
    about = http_client.get("/v1/info").json()
    assert len(about["classes"]) == 10
    assert about["text_width"] == TEXT
    assert about["limits"]["body_bytes"] == 2**20
    assert all(size >= 1 for size in about["batch_sizes"].values())
    assert about["batch_tolerance"] == 0  # fixed shapes: the bundled model is deterministic


def test_the_same_logits_as_json_and_as_tensors(http_client, points) -> None:
    tensors = fields(points)
    first = post(http_client, save(tensors, {"points": points}), "both-1")
    assert first.status_code == 200
    assert first.headers["x-flops-queries"] == "3"
    assert first.headers["x-flops-replayed"] == "false"
    given = {name: value.tolist() for name, value in tensors.items()} | {"points": points}
    second = post(http_client, json.dumps(given).encode(), "both-2", JSON)
    assert second.status_code == 200, second.text
    logits = load(first.content)["logits"]  # the library reads what the service writes
    assert logits.shape == (3, 10)
    assert torch.equal(torch.tensor(second.json()["logits"]), logits)
    assert second.json()["texts"] == 30


def test_costs_count_what_is_distinct(http_client, points) -> None:
    """4 rows: points 0 0 1 1; the second text prompt equals the first; one image prompt."""
    text = torch.zeros(3, 2, TEXT)
    text[2] = 1
    body = ScoreRequest(
        points,
        torch.tensor([0, 0, 1, 1]),
        text,
        torch.tensor([0, 1, 2, 2]),
        torch.zeros(1, 2, IMAGE),
        torch.zeros(4, dtype=torch.int64),
    ).body()
    answer = post(http_client, body, "costs")
    headers = [answer.headers[f"x-flops-{name}"] for name in ("queries", "texts", "images")]
    assert headers == ["4", "20", "2"]
    logits = load(answer.content)["logits"]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[1], logits[2])


def test_an_empty_prompt_is_allowed(http_client, points) -> None:
    asked = query(points, "-", rows=2, tokens=0)
    body = encode({name: getattr(asked, name) for name in SCORE}, {"points": points})
    assert post(http_client, body, "no-tokens").status_code == 200
    given = {name: getattr(asked, name).tolist() for name in SCORE} | {"points": points}
    assert post(http_client, json.dumps(given).encode(), "none", JSON).status_code == 200


REFUSED = {
    "no rows": ({"rows": torch.zeros(0, dtype=torch.int64)}, 422),
    "too many rows": ({"rows": torch.zeros(1025, dtype=torch.int64)}, 422),
    "rows of another length": ({"rows": torch.tensor([0, 1])}, 422),
    "rows in a matrix": ({"rows": torch.zeros(3, 1, dtype=torch.int64)}, 422),
    "rows of another type": ({"rows": torch.zeros(3)}, 422),
    "a point that is not there": ({"rows": torch.tensor([0, 1, 12])}, 422),
    "a negative point": ({"rows": torch.tensor([0, 1, -1])}, 422),
    "a prompt that is not there": ({"text_of": torch.tensor([0, 1, 3])}, 422),
    "a negative prompt": ({"image_of": torch.tensor([0, 1, -1])}, 422),
    "another width": ({"text": torch.zeros(3, 4, TEXT + 1)}, 422),
    "too many tokens": ({"image": torch.zeros(3, 17, IMAGE)}, 422),
    "a matrix of prompts": ({"image": torch.zeros(3, IMAGE)}, 422),
    "no prompts": ({"text": torch.zeros(0, 4, TEXT)}, 422),
    "double precision": ({"text": torch.zeros(3, 4, TEXT, dtype=torch.float64)}, 422),
    "half precision": ({"text": torch.zeros(3, 4, TEXT, dtype=torch.float16)}, 422),
    "NaN": ({"text": torch.full((3, 4, TEXT), float("nan"))}, 422),
    "infinity": ({"image": torch.full((3, 4, IMAGE), float("inf"))}, 422),
    "one tensor more": ({"more": torch.zeros(1)}, 422),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bodies_that_do_not_fit_are_refused(name, http_client, points) -> None:
    change, status = REFUSED[name]
    body = save(fields(points) | change, {"points": points})
    answer = post(http_client, body, "refused")
    assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
    # nothing was kept under the key
    assert answer.json() == post(http_client, body, "refused").json()


def test_logits_that_overflow_are_refused(http_client, points) -> None:
    tensors = fields(points) | {"text": torch.full((3, 4, TEXT), 3e38)}
    answer = post(http_client, save(tensors, {"points": points}), "overflow")
    assert answer.status_code in (200, 422)
    if answer.status_code == 200:
        assert bool(torch.isfinite(load(answer.content)["logits"]).all())


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", BINARY, 400),
        (b"\x00" * 8, BINARY, 400),
        (b"\xff" * 8 + b"{}", BINARY, 400),
        ((10).to_bytes(8, "little") + b"[[[[[[[[[[", BINARY, 400),
        ((60000).to_bytes(8, "little") + b"[" * 60000, BINARY, 400),
        ((4).to_bytes(8, "little") + b"null", BINARY, 400),
        (b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.", BINARY, 400),  # a pickle
        (b"{}", JSON, 422),
        (b"[" * 100_000, JSON, 400),
        (b"{", JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"{}", "text/plain", 415),
        (b"{}", "multipart/form-data", 415),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(body, kind, status, http_client) -> None:
    answer = post(http_client, body, "unreadable", kind)
    assert answer.status_code == status, answer.text
    assert "Traceback" not in answer.text


def test_values_of_json_are_checked(http_client, points) -> None:
    good = {name: value.tolist() for name, value in fields(points).items()} | {"points": points}
    for change in (
        {"rows": [0, 1, 2**70]},
        {"rows": [0, 1, True]},
        {"rows": [0, 1, 1.5]},
        {"rows": "012"},
        {"text": [[["1"] * TEXT]] * 3},
        {"text": [[[1e39] * TEXT]] * 3},
        {"text": [[[float("nan")] * TEXT]] * 3},
        {"text": [[[0.0] * TEXT], [[0.0] * TEXT] * 2, [[0.0] * TEXT]]},
        {"points": "../../etc/passwd"},
        {"other": 1},
    ):
        answer = post(http_client, json.dumps(good | change).encode(), "json", JSON)
        assert answer.status_code == 422, (change, answer.text)


def test_json_is_read_up_to_the_first_error() -> None:
    """An error is an object with a place and a message: there must not be one for each value."""
    lists = [[["a"] * 20] * 20] * 20
    given = {name: lists for name in SCORE} | {"points": "0" * 64}
    with pytest.raises(ValidationError) as caught:
        ScoreBody.model_validate(given)
    assert caught.value.error_count() == len(SCORE)


def test_points_that_were_never_uploaded_are_not_found(http_client) -> None:
    answer = post(http_client, save(fields("0" * 64), {"points": "0" * 64}), "nowhere")
    assert answer.status_code == 404


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "../up", "a\tb", "é".encode()])
def test_keys_are_checked(key, http_client, points) -> None:
    body = save(fields(points), {"points": points})
    assert post(http_client, body, key).status_code == 422
    assert http_client.post("/v1/score", content=body, headers=BINARY_HEADERS).status_code == 422


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "%2e%2e%2fpasswd", "A" * 64, "0" * 63, "0" * 64 + "%00", "0" * 64 + "%0a"],
)
def test_addresses_of_points_are_digests(path, server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Authorization": f"Bearer {KEY}", **BINARY_HEADERS}
    connection.request("PUT", f"/v1/points/{path}", encode({"pixels": pixels()}), headers)
    assert connection.getresponse().status in (404, 405, 422)
    connection.close()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 28, 28),
        torch.zeros(0, 28, 28, dtype=torch.uint8),
        torch.zeros(2, 0, 28, dtype=torch.uint8),
        torch.zeros(2, 28, 28, 5, dtype=torch.uint8),
        torch.zeros(28, 28, dtype=torch.uint8),
    ],
)
def test_points_are_checked(wrong, http_client) -> None:
    body = save({"pixels": wrong})
    answer = http_client.put(f"/v1/points/{digest(body)}", content=body, headers=BINARY_HEADERS)
    assert answer.status_code == 422, answer.text


def test_the_digest_of_points_is_checked(http_client) -> None:
    body = encode({"pixels": pixels(3)})
    address = f"/v1/points/{digest(body)}"
    assert http_client.put(address, content=body + b"x", headers=BINARY_HEADERS).status_code == 422
    statuses = [
        http_client.put(address, content=body, headers=BINARY_HEADERS).status_code for _ in "ab"
    ]
    assert statuses == [201, 200]


def test_an_announced_body_that_is_too_large_is_refused(http_client) -> None:
    answer = post(http_client, bytes(2**20 + 1), "large")
    assert answer.status_code == 413
    assert "1048576" in answer.json()["error"]


def test_an_endless_body_is_refused_while_it_streams(server) -> None:
    """Far more than the limit arrives without a length; memory stays where it was."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: {BINARY}\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode())
    before, sent = server.resident(), 0
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    try:
        while sent < 2**28:
            connection.sendall(chunk)
            sent += 2**20
    except OSError:
        pass
    assert sent < 2**28, "it was read to the end"
    assert server.resident() - before < 2**26
    connection.close()


@pytest.mark.parametrize("piece", [b"x", b"X-More: 1\r\n"])
def test_headers_without_end_are_refused(piece, server) -> None:
    """One endless header, and endless headers."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX-Long: 1")
    connection.sendall(b"\r\n" if piece.endswith(b"\n") else b"")
    before, sent, block = server.resident(), 0, piece * (2**20 // len(piece))
    try:
        while sent < 2**27:
            connection.sendall(block)
            sent += len(block)
    except OSError:
        pass
    connection.close()
    assert sent < 2**26, "it was read to the end"
    assert server.resident() - before < 2**25


def test_unknown_addresses_and_methods(http_client) -> None:
    assert http_client.get("/v1/weights").status_code == 404
    assert http_client.get("/v1/score").status_code == 405
    assert http_client.get("/v1/../../etc/passwd").status_code == 404
    assert set(http_client.get("/nothing").json()) == {"error"}


def test_metrics_and_pages_can_be_read(http_client, server, points) -> None:
    with server.client() as client:
        client.send(query(points, "for-the-metrics"))
    text = http_client.get("/v1/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["flops_rows_total"]) > 0
    assert float(values["flops_resident_bytes"]) > 0
    assert http_client.get("/docs").status_code == 200
    assert "/v1/score" in http_client.get("/openapi.json").json()["paths"]


def test_the_rate_is_limited(tmp_path) -> None:
    """8 requests at once, 2 per second: some are sent away, and told for how long."""
    with Server(tmp_path, "--rate", "2") as slow:
        statuses, waits = [], []

        def get() -> None:
            with httpx.Client(trust_env=False) as client:
                answer = client.get(f"{slow.url}/v1/info")
            statuses.append(answer.status_code)
            waits.append(answer.headers.get("retry-after"))

        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(set(statuses)) == [200, 429]
        assert {wait for wait, status in zip(waits, statuses, strict=True) if status == 429} == {
            "1"
        }
        # a client waits and gets through
        with slow.client(attempts=20) as client:
            name = client.upload(pixels())
            assert client.score(**vars(query(name, "patient"))).queries == 6
            assert client.counts["retries"] > 0
