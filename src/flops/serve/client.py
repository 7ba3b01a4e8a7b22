"""The client: retries until it has every answer, and is charged once for each.

Every attempt of a request sends the same bytes under the same idempotency key, so a retry is always
safe: an answer that the service has already computed is free.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from flops.serve.codec import BINARY, WireError, decode, digest, encode
from flops.serve.credentials import checked_key, checked_url
from flops.serve.retry import RETRYABLE, RetryableError, RetryPolicy, ServiceError, checked
from flops.serve.schema import KEY, ScoreRequest

T = TypeVar("T")
CONNECT_SECONDS = 2.5  # timeout of the first request
CERTAIN_SECONDS = 0.5  # after a refusal, or an answer that only another server gives
__all__ = ["KeyedScoreRequest", "Scores", "ServiceClient", "ServiceError", "check_service"]


@dataclass(frozen=True, eq=False)
class KeyedScoreRequest(ScoreRequest):
    """Rows to score under one key: see `ServiceClient.score`."""

    key: str


@dataclass(frozen=True, eq=False)
class Scores:
    """Logits and their cost; a replayed answer is free."""

    logits: Tensor  # (Q, C)
    queries: int
    texts: int
    images: int
    replayed: bool


class ServiceClient:
    """Talks to `flops serve`; threads may share it.

    Args:
        url: As `flops serve` prints it.
        api_key: The key, if the service needs one.
        timeout: Seconds for the service to send something, in each attempt.
        concurrency: Largest number of requests in flight.
        attempts: Attempts per request.
        retries: How long to wait between them; the default backs off up to 10 s with full jitter.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 60.0,
        concurrency: int = 8,
        attempts: int = 12,
        retries: RetryPolicy | None = None,
    ) -> None:
        self.url = checked_url(url)
        api_key = None if api_key is None else checked_key(api_key)
        self.concurrency = concurrency
        self._retries = retries or RetryPolicy(attempts)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        pool = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        # Ignore proxies of the environment, which cannot reach a local service.
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, pool=None),
            limits=pool,
            trust_env=False,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Requests, retries, replays and answers so far."""
        with self._counting:
            names = ("requests", "retries", "replays", "answers")
            return {name: self._counts[name] for name in names}

    def info(self) -> dict[str, Any]:
        """Model and limits of the service."""
        return self._request("GET", "/v1/info", _info)

    def usage(self) -> dict[str, int]:
        """Totals of the service's answer store."""
        return self._json("/v1/usage")

    def upload(self, pixels: Tensor) -> str:
        """Upload points and return their digest, which identifies them. Idempotent.

        Args:
            pixels: uint8 (N, H, W) or (N, H, W, C).
        """
        body = encode({"pixels": pixels})
        name = digest(body)

        def read(response: httpx.Response) -> str:
            if _object(response).get("points") != name:
                raise RetryableError("the response to the upload has no digest of the points")
            return name

        return self._request("PUT", f"/v1/points/{name}", read, body)

    def score(
        self,
        points: str,
        rows: Tensor,
        text: Tensor,
        text_of: Tensor,
        image: Tensor,
        image_of: Tensor,
        key: str,
    ) -> Scores:
        """Logits of rows: point `rows[i]`, prompts `text[text_of[i]]` and `image[image_of[i]]`.

        Args:
            points: Digest of uploaded points.
            rows: Indices of points, int64 (Q,).
            text: Text prompts, float32 (P, m_T, text_width).
            text_of: Text prompt of each row, int64 (Q,).
            image: Image prompts, float32 (R, m_I, image_width).
            image_of: Image prompt of each row, int64 (Q,).
            key: Idempotency key: 1 to 128 letters, digits or _ . : -

        Raises:
            ServiceError: The service rejects the request, the logits are not finite, or all
                attempts fail.
        """
        return self.send(KeyedScoreRequest(points, rows, text, text_of, image, image_of, key))

    def send(self, request: KeyedScoreRequest) -> Scores:
        """As `score`, for a request object."""
        if not KEY.fullmatch(request.key):
            raise ServiceError(
                f"the key {request.key!r} is not 1 to 128 letters, digits or _ . : -"
            )
        body = request.body()

        def read(response: httpx.Response) -> Scores:
            scores = _scores(response, len(request.rows), request.key)
            if not bool(torch.isfinite(scores.logits).all()):
                raise ServiceError(
                    f"the answer to {request.key} from {self.url} has logits that are not finite"
                )
            return scores

        scores = self._request("POST", "/v1/score", read, body, request.key)
        self._count("answers")
        self._count("replays", int(scores.replayed))
        return scores

    def send_many(self, requests: Iterable[KeyedScoreRequest]) -> Iterator[tuple[int, Scores]]:
        """Send with bounded concurrency, and yield (position, scores) of each answer as it arrives.

        If one fails, no more are sent, those in flight are still yielded, and then the error is
        raised: no answer that was charged is lost.
        """
        waiting: dict[Future[Scores], int] = {}
        error: BaseException | None = None
        source = enumerate(requests)
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="score")
        try:
            while True:
                while error is None and len(waiting) < self.concurrency:
                    following = next(source, None)
                    if following is None:
                        break
                    waiting[pool.submit(self.send, following[1])] = following[0]
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    position = waiting.pop(future)
                    failure = future.exception()
                    if failure is None:
                        yield position, future.result()
                    else:
                        error = error or failure
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _json(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, _object)

    def _request(
        self,
        method: str,
        path: str,
        read: Callable[[httpx.Response], T],
        body: bytes = b"",
        key: str = "",
    ) -> T:
        headers = {"Content-Type": BINARY} if body else {}
        if key:
            headers["Idempotency-Key"] = key

        name = f"{method} {self.url}{path}" + (f" with the key {key}" if key else "")

        def attempt(number: int) -> T:
            self._count("requests")
            self._count("retries", int(number > 0))
            url = self.url + path
            response = self._http.request(method, url, content=body or None, headers=headers)
            return read(checked(response, name))

        return self._retries.run(attempt, name)

    def _count(self, name: str, by: int = 1) -> None:
        with self._counting:
            self._counts[name] += by


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
    content, timeout = (
        b"",
        max(0.1, end - time.monotonic()) / 2,
    )  # for connecting and for the response
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


def _scores(response: httpx.Response, rows: int, key: str) -> Scores:
    """Validate an answer; an unreadable one is retried."""
    headers = response.headers
    try:
        logits = decode(bytearray(response.content), {"logits": torch.float32})[0]["logits"]
        cost = [int(headers[f"X-Flops-{name}"]) for name in ("Queries", "Texts", "Images")]
        replayed = {"true": True, "false": False}[headers["X-Flops-Replayed"]]
        matches = headers["X-Flops-Key"] == key
        whole = headers["X-Flops-Digest"] == digest(response.content)
    except (WireError, KeyError, ValueError) as error:
        raise RetryableError(f"the answer cannot be read: {error}") from error
    if not matches or not whole or logits.ndim != 2 or len(logits) != rows:
        raise RetryableError(f"the answer is not for {rows} rows under this key")
    queries, texts, images = cost
    return Scores(logits, queries, texts, images, replayed)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise RetryableError("the response is not JSON") from error
    if not isinstance(found, dict):
        raise RetryableError("the response is not a JSON object")
    return found


def _info(response: httpx.Response) -> dict[str, Any]:
    found = _object(response)
    if "digest" not in found or "limits" not in found:
        raise RetryableError("the response does not describe a service")
    return found
