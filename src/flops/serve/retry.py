"""When to ask again and how long to wait: exponential backoff with full jitter."""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import httpx

from flops.errors import FlopsError

T = TypeVar("T")
AGAIN = frozenset({429, 500, 502, 503, 504})
NEVER = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class ServiceError(FlopsError):
    """The service refuses, or does not answer as it should."""


class Retry(Exception):
    """This attempt failed in a way that another may not."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class Retries:
    """Tries again after uniform(0, min(longest, first * 2^n)) seconds, as Brooker (2015) advises.

    Retry-After is waited for in full, and the jitter on top of it, so that those who were sent away
    together do not come back together. The jitter has a generator of its own.

    Args:
        attempts: Tries before it is an error.
        first: Mean of the first wait is half of this.
        longest: Bound of the jitter in seconds.
        obey: Most seconds of Retry-After that are waited for.
        sleep: Waits.
    """

    attempts: int = 12
    first: float = 0.1
    longest: float = 10.0
    obey: float = 120.0
    sleep: Callable[[float], None] = time.sleep
    _random: random.Random = field(default_factory=random.Random, init=False)
    _drawing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ServiceError(f"attempts must be at least 1, got {self.attempts}")

    def run(self, attempt: Callable[[int], T], name: str) -> T:
        """The result of the first attempt that succeeds.

        Args:
            attempt: Of its number, from 0 on.
            name: Of what is asked, for errors.

        Raises:
            ServiceError: Refused, or all attempts failed.
        """
        for number in range(self.attempts):
            try:
                return attempt(number)
            except NEVER as error:
                raise ServiceError(f"{name}: {error}") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                reason, after = f"{type(error).__name__} {error}".strip(), 0.0
                cause: Exception = error
            except Retry as error:
                reason, after, cause = str(error), error.after or 0.0, error
            if number + 1 == self.attempts:
                raise ServiceError(
                    f"{name}: no usable answer in {self.attempts} attempts; the last: {reason}"
                ) from cause
            self.sleep(min(after, self.obey) + self.jitter(number))
        raise AssertionError("unreachable")

    def jitter(self, number: int) -> float:
        """Seconds to wait after attempt number `number`."""
        with self._drawing:
            return self._random.uniform(0, min(self.longest, self.first * 2.0 ** min(number, 60)))


def checked(response: httpx.Response, name: str) -> httpx.Response:
    """A successful response.

    Raises:
        Retry: A status after which another attempt may succeed.
        ServiceError: Any other.
    """
    if response.status_code in (200, 201):
        return response
    message = f"{response.status_code}: {_message(response)}"
    if response.status_code in AGAIN:
        raise Retry(message, seconds(response.headers.get("retry-after")))
    raise ServiceError(f"{name}: {message}")


def seconds(header: str | None) -> float:
    """Seconds of a Retry-After header, a number or a date; 0 for what cannot be read."""
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
