"""Limits on the size, number and rate of requests."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cachetools import LRUCache

from flops.serve.codec import WireError


@dataclass(frozen=True)
class Limits:
    """What the service accepts.

    Args:
        rows: Rows per request.
        body: Bytes of a score request.
        json: Bytes of a JSON request, whose objects take many times as much memory.
        upload: Bytes of an upload of points.
        points: Points per upload.
        stored: Bytes of all uploads together.
        memory: Bytes of all request bodies in memory.
        queue: Requests in flight.
        tokens: Prompt tokens, as far as the model allows.
        rate: Requests per second; 0 for no limit.
        patience: Seconds for a body to arrive.
        store: Bytes of the answer store's file.
    """

    rows: int = 1024
    body: int = 32 * 2**20
    json: int = 2**20
    upload: int = 256 * 2**20
    points: int = 100_000
    stored: int = 2**30
    memory: int = 512 * 2**20
    queue: int = 1024
    tokens: int = 16
    rate: float = 1000.0
    patience: float = 60.0
    store: int = 16 * 2**30


@dataclass
class TokenBucket:
    """A token bucket: a request takes a token or gets the time until the next.

    Args:
        rate: Tokens per second; 0 for no limit.
        clock: Returns seconds.
        burst: Capacity; None for the tokens of one second.
    """

    rate: float
    clock: Callable[[], float] = time.monotonic
    burst: float | None = None
    _tokens: float = field(init=False)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._last = self._most, self.clock()

    @property
    def _most(self) -> float:
        return max(1.0, self.rate if self.burst is None else self.burst)

    def take(self) -> None:
        """Take a token.

        Raises:
            WireError: 429, with the seconds until there is one.
        """
        seconds = self.wait()
        if seconds:
            raise WireError(f"more than {self.rate:g} requests per second", 429, seconds)
        self._tokens -= 1

    def wait(self) -> float:
        """Seconds until there is a token; 0 if there is one."""
        if not self.rate:
            self._tokens = self._most
            return 0.0
        now = self.clock()
        self._tokens = min(self._most, self._tokens + (now - self._last) * self.rate)
        self._last = now
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self.rate


class WrongKeyLimit:
    """Limits wrong API keys per address, against brute force.

    An address over its limit is rejected before its key is compared; a right key is rejected too,
    or its acceptance would reveal it. Right keys are not counted.

    Args:
        rate: Wrong keys per second and address.
        burst: Capacity of the bucket.
        addresses: Largest number of tracked addresses; the least recently used is evicted.
    """

    def __init__(self, rate: float = 5.0, burst: float = 40.0, addresses: int = 4096) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: LRUCache[str, TokenBucket] = LRUCache(addresses)

    def check(self, address: str) -> None:
        """Check the limit, before a key is compared.

        Raises:
            WireError: 429, with the seconds to wait.
        """
        bucket = self._buckets.get(_network(address))
        seconds = bucket.wait() if bucket is not None else 0.0
        if seconds:
            raise WireError("too many wrong keys from this address", 429, seconds)

    def count(self, address: str) -> None:
        """Count a wrong key."""
        name = _network(address)
        bucket = self._buckets.setdefault(name, TokenBucket(self._rate, burst=self._burst))
        bucket.take()


def _network(address: str) -> str:
    """The /64 of an IPv6 address, which belongs to one customer; an IPv4 address unchanged."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped:
        return str(parsed)
    return str(ipaddress.ip_network(f"{parsed}/64", strict=False))


class BodyReader:
    """Reads request bodies in chunks, and rejects them as soon as a limit is exceeded.

    Args:
        memory: Bytes of all request bodies in memory.
        patience: Seconds for a body to arrive.
    """

    def __init__(self, memory: int, patience: float) -> None:
        self.held = 0
        self._memory = memory
        self._patience = patience

    @asynccontextmanager
    async def read(
        self, pieces: AsyncIterator[bytes], announced: str | None, most: int
    ) -> AsyncIterator[bytearray]:
        """The body, counted as in memory until the block ends.

        Args:
            pieces: Chunks of the body, as they arrive.
            announced: The header Content-Length, if present.
            most: Largest size of this body, in bytes.

        Raises:
            WireError: 413, 408, or 429 if other bodies fill the memory.
        """
        body = bytearray()
        try:
            if announced is not None and announced.isdecimal() and int(announced[:20]) > most:
                await self._drop(pieces, most)
                raise _too_large(most)
            try:
                async with asyncio.timeout(self._patience):
                    async for piece in pieces:
                        if len(body) + len(piece) > most:
                            await self._drop(pieces, most)
                            raise _too_large(most)
                        if self.held + len(piece) > self._memory:
                            await self._drop(pieces, most)
                            raise WireError(
                                "too many large requests at a time; retry later", 429, 1
                            )
                        self.held += len(piece)
                        body += piece
            except TimeoutError:
                raise WireError(
                    f"the body did not arrive within {self._patience:g} s", 408
                ) from None
            yield body
        finally:
            self.held -= len(body)

    async def _drop(self, pieces: AsyncIterator[bytes], most: int) -> None:
        """Discard a little more, so that the client can read the error."""
        dropped = 0
        try:
            async with asyncio.timeout(2):
                async for piece in pieces:
                    dropped += len(piece)
                    if dropped > most:
                        return
        except TimeoutError:
            return


def retry_after(seconds: float) -> str:
    """Value of the header: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def _too_large(most: int) -> WireError:
    return WireError(f"the body has more than {most} bytes; send fewer rows or points", 413)
