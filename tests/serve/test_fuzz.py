"""The service under requests made from its own schema, and valid ones that are damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
)

from flops.serve.codec import BINARY, JSON, encode
from flops.serve.schema import SCORE
from tests.support.abusing import healthy, json_bodies, send_json
from tests.support.serving import Server, pixels, query

REQUESTS = int(os.environ.get("FLOPS_TEST_REQUESTS", "20000"))
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    with Server(folder, "--rate", "0", "--max-body", "32") as running:
        yield running
        assert running.process.poll() is None, "it died"
    assert "Traceback" not in (folder / "stderr").read_text()


def tries(count: int):
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def modest(text: str) -> None:
    """An answer that says nothing about the inside of the service."""
    assert "Traceback" not in text
    assert 'File "' not in text
    assert os.sep + "flops" + os.sep not in text


def from_schema(server: Server, count: int) -> int:
    """Requests that fit the schema and ones that do not; how many were sent."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    sent = 0
    with requests.Session() as session:
        session.trust_env = False
        for found in schema.get_all_operations():
            operation = found.ok()
            simple = operation.method == "get"
            for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
                if simple and mode is GenerationMode.NEGATIVE:
                    continue  # there is nothing to get wrong

                @tries(3 if simple else count)
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case) -> None:
                    nonlocal sent
                    answer = case.call(session=session, timeout=60)
                    sent += 1
                    assert answer.status_code < 500, answer.text
                    modest(answer.text)
                    case.validate_response(answer, checks=CHECKS)

                check()
    return sent


def damaged(server: Server, count: int) -> int:
    """A valid body with some bytes changed, cut or added, or other numbers in its header."""
    with server.client() as client:
        name = client.upload(pixels())
    asked = query(name, "-", rows=2, tokens=1)
    body = encode({part: getattr(asked, part) for part in SCORE}, {"points": name})
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    numbers = st.one_of(st.integers(-(2**70), 2**70), st.integers(-3, 70), st.floats(), st.none())
    places = st.lists(st.tuples(st.integers(0, size + 40), st.integers(0, 255)), max_size=4)
    statuses: set[int] = set()
    sent = 0

    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:

        def send(content: bytes) -> None:
            nonlocal sent
            sent += 1
            headers = {"Content-Type": BINARY, "Idempotency-Key": f"damaged-{sent}"}
            answer = client.post("/v1/score", content=content, headers=headers)
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200:
                modest(answer.text)
            statuses.add(answer.status_code)

        @tries(count // 2)
        @given(places, st.integers(0, len(body)), st.binary(max_size=9), st.booleans())
        def bytes_change(changes, end, more, cut) -> None:
            spoilt = bytearray(body)
            for place, value in changes:
                spoilt[place] = value
            send(bytes(spoilt[:end] if cut else spoilt + more))

        @tries(count // 2)
        @given(
            st.sampled_from(sorted(SCORE)),
            st.sampled_from(["shape", "data_offsets", "dtype"]),
            st.one_of(
                numbers, st.lists(numbers, max_size=4), st.sampled_from(["F64", "U8", "I64"])
            ),
        )
        def header_changes(tensor, field, value) -> None:
            spoilt = header | {tensor: header[tensor] | {field: value}}
            text = json.dumps(spoilt).encode()
            send(len(text).to_bytes(8, "little") + text + body[8 + size :])

        send(body)
        bytes_change()
        header_changes()
    assert {200, 400, 422} <= statuses
    return sent


def json_fuzz(server: Server, count: int) -> int:
    """JSON of any shape, and the shape that fits with wrong values in it."""
    values = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=5), inner, max_size=4)
        ),
        max_leaves=20,
    )
    names = ["points", *SCORE]
    fitting = st.fixed_dictionaries({name: values for name in names})
    sent = 0
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:

        @tries(count)
        @given(st.one_of(values, fitting))
        def send(value) -> None:
            nonlocal sent
            sent += 1
            headers = {"Content-Type": JSON, "Idempotency-Key": f"json-{sent}"}
            body = json.dumps(value).encode()
            answer = client.post("/v1/score", content=body, headers=headers)
            assert 400 <= answer.status_code < 500, answer.text
            modest(answer.text)

        send()
    return sent


def everything(server: Server, count: int) -> None:
    """At least so many requests; health answers all the time, and memory comes back."""
    with server.client() as client:
        client.score(**vars(query(client.upload(pixels()), f"warm-{count}")))
    before, sent = server.resident(), 0
    with healthy(server, within=5.0):  # the same bodies one by one: `test_service_abuse`
        sent += from_schema(server, max(40, count // 80))
        sent += json_fuzz(server, count // 4)
        for size in (300_000, 1_000_000, 31_000_000):
            for body in json_bodies(size).values():
                assert 400 <= send_json(server, body).status_code < 500
                sent += 1
        sent += damaged(server, max(200, count - sent))
    assert sent >= count
    grown = (server.resident() - before) / 2**20
    assert grown < 100
    print(f"{sent} requests, {grown:.0f} MB more than before")


@pytest.mark.slow
def test_a_few_hundred_requests(server) -> None:
    everything(server, 320)


@pytest.mark.slow
def test_many_requests(server) -> None:
    everything(server, REQUESTS)
