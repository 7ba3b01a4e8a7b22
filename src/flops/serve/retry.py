"""Retries: exponential backoff with full jitter."""

from __future__ import annotations

import email.utils
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from flops.errors import FlopsError

T = TypeVar("T")
RETRYABLE = frozenset({429, 500, 502, 503, 504})
NOT_RETRYABLE = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class ServiceError(FlopsError):
    """The service rejects a request, or its response is invalid."""


class RetryableError(Exception):
    """An attempt failed, and another may succeed.

    Args:
        reason: For the error message of the last attempt.
        after: Seconds of Retry-After, if the service sent it.
    """

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class RetryPolicy:
    """Waits uniform(0, min(maximum, initial * 2^n)) seconds before retry n (Brooker, 2015).

    The jitter is added to Retry-After, so that clients that were rejected together do not retry
    together. It has its own random generator.

    Args:
        attempts: Largest number of attempts.
        initial: Bound of the first jitter in seconds.
        maximum: Bound of any jitter in seconds.
        max_retry_after: Upper bound of Retry-After in seconds.
        sleep: Waits for a number of seconds.
    """

    attempts: int = 12
    initial: float = 0.1
    maximum: float = 10.0
    max_retry_after: float = 120.0
    sleep: Callable[[float], None] = time.sleep
    _random: random.Random = field(default_factory=random.Random, init=False)
    _drawing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ServiceError(f"attempts must be at least 1, got {self.attempts}")

    def run(self, attempt: Callable[[int], T], name: str) -> T:
        """The result of the first attempt that succeeds.

        Args:
            attempt: Called with its number, from 0 on.
            name: Name of the request, for errors.

        Raises:
            ServiceError: The request was rejected, or all attempts failed.
        """
        numbers = itertools.count()

        def failed(state: RetryCallState) -> T:
            error = _error(state)
            reason = str(error)
            if not isinstance(error, RetryableError):
                reason = f"{type(error).__name__} {error}".strip()
            raise ServiceError(
                f"{name}: no usable answer in {self.attempts} attempts; the last: {reason}"
            ) from error

        def once() -> T:
            try:
                return attempt(next(numbers))
            except NOT_RETRYABLE as error:
                raise ServiceError(f"{name}: {error}") from error

        retrying = Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=self._wait,
            retry=retry_if_exception_type(
                (RetryableError, httpx.TransportError, httpx.DecodingError)
            ),
            sleep=self.sleep,
            retry_error_callback=failed,
        )
        return retrying(once)

    def _wait(self, state: RetryCallState) -> float:
        after = getattr(_error(state), "after", None) or 0.0
        return min(after, self.max_retry_after) + self.jitter(state.attempt_number - 1)

    def jitter(self, number: int) -> float:
        """Seconds to wait after attempt number `number`."""
        bound = min(self.maximum, self.initial * 2.0 ** min(number, 60))
        with self._drawing:
            return self._random.uniform(0, bound)


def _error(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def checked(response: httpx.Response, name: str) -> httpx.Response:
    """A successful response.

    Raises:
        RetryableError: A status after which another attempt may succeed.
        ServiceError: Any other.
    """
    if response.status_code in (200, 201):
        return response
    message = f"{response.status_code}: {_message(response)}"
    if response.status_code in RETRYABLE:
        raise RetryableError(message, seconds(response.headers.get("retry-after")))
    raise ServiceError(f"{name}: {message}")


def seconds(header: str | None) -> float:
    """Seconds of a Retry-After header, a number or a date; 0 if invalid."""
    if header is None:
        return 0.0
    if header.strip().isdecimal() and len(header) < 10:
        return float(header)
    try:
        when = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _message(response: httpx.Response) -> str:
    try:
        return str(json.loads(response.content)["error"])[:500]
    except (ValueError, TypeError, KeyError, RecursionError):
        return response.text[:200]
