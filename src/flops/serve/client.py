"""The client: retries until it has every answer, and is charged once for each.

Every attempt of a request sends the same bytes under the same idempotency key, so a retry is always
safe: an answer that the service has already computed is free.
"""

from __future__ import annotations

import json
import threading
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
from flops.serve.retry import RetryableError, RetryPolicy, ServiceError, checked
from flops.serve.schema import KEY, ScoreRequest

T = TypeVar("T")
__all__ = ["KeyedScoreRequest", "Scores", "ServiceClient", "ServiceError"]


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
