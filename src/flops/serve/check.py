"""Whether a `flops serve` answers at an address; checked before torch is imported."""

from __future__ import annotations

import json
import time

import httpx

from flops.serve.credentials import checked_key, checked_url
from flops.serve.retry import RETRYABLE, ServiceError

CONNECT_SECONDS = 2.5  # timeout of the first request
CERTAIN_SECONDS = 0.5  # after a refusal, or an answer that only another server gives


def check_service(url: str, api_key: str | None = None) -> None:
    """Check within 3 seconds that a `flops serve` answers there and accepts the key.

    Raises:
        ServiceError: One line that names the option to change.
    """
    url = checked_url(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {checked_key(api_key)}"}
    began = time.monotonic()
    end = began + CONNECT_SECONDS
    with httpx.Client(headers=headers, trust_env=False) as http:
        while True:
            certain = False
            try:
                response, content = _start_of(http, f"{url}/v1/info", end)
                problem = _problem(response, content, url, api_key is not None)
                certain = 400 <= response.status_code < 500
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                certain = isinstance(error, httpx.ConnectError)
                problem = (
                    f"no service answers at {url} ({type(error).__name__}): start one with `flops "
                    "serve`, or pass its address with --url"
                )
            if problem is None:
                return
            # Earlier attempts may have been network failures.
            if time.monotonic() + 0.6 > end or (
                certain and time.monotonic() > began + CERTAIN_SECONDS
            ):
                raise ServiceError(problem)
            time.sleep(0.2)


def _start_of(http: httpx.Client, url: str, end: float) -> tuple[httpx.Response, bytes]:
    """A response and its first megabytes: an unknown server may send without end."""
    content = b""
    timeout = max(0.1, end - time.monotonic()) / 2  # for connecting and for the response
    with http.stream("GET", url, timeout=timeout) as response:
        for piece in response.iter_raw():
            content += piece
            if len(content) > 2**22 or time.monotonic() > end:
                break
    return response, content


def _problem(response: httpx.Response, content: bytes, url: str, keyed: bool) -> str | None:
    """Why this is not a response of `flops serve`; None if it is."""
    status = response.status_code
    if status in (401, 403):
        shown = "rejects the key" if keyed else "needs a key"
        option = "pass it with --api-key-env or --api-key-file"
        raise ServiceError(f"the service at {url} {shown} ({status}): {option}")
    if status in RETRYABLE and "retry-after" in response.headers:
        return None  # the service is busy
    try:
        found = json.loads(content) if status == 200 else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and {"digest", "limits"} <= found.keys():
        return None
    return (
        f"the server at {url} is not a `flops serve` (status {status} for /v1/info): pass the "
        "address of one with --url"
    )
