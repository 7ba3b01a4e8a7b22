"""Limits: what one request may hold, how many there may be, and how fast they may come."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from flops.serve.codec import WireError


@dataclass(frozen=True)
class Limits:
    """What the service accepts.

    Args:
        rows: Rows of a request.
        body: Bytes of a request to score.
        json: Bytes of one in JSON, whose objects take many times as much memory.
        upload: Bytes of an upload of points.
        points: Points of an upload.
        stored: Bytes of all uploads together.
        memory: Bytes of all bodies that are held at a time.
        queue: Requests that wait or are computed at a time.
        tokens: Prompt tokens, as far as the model allows.
        rate: Requests per second; 0 for no limit.
        patience: Seconds for a body to arrive.
        ledger: Bytes of the ledger's file.
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
    ledger: int = 16 * 2**30


@dataclass
class Rate:
    """A bucket of tokens that fills at a rate; a request takes one or is told when to come back.

    Args:
        rate: Tokens per second; 0 for no limit.
        clock: Seconds.
        burst: Most tokens; None for those of a second.
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


class Guesses:
    """Limits wrong keys for each address, or nobody's key would be safe from being guessed.

    Whoever has used up the guesses is sent away before the key is looked at; a right key waits too,
    since it would be known by being let in. Right keys cost nothing.

    Args:
        rate: Wrong keys per second and address.
        burst: Wrong keys that may come at once.
        addresses: Most that are remembered; the oldest is forgotten.
    """

    def __init__(self, rate: float = 5.0, burst: float = 40.0, addresses: int = 4096) -> None:
        self._rate, self._burst, self._most = rate, burst, addresses
        self._found: OrderedDict[str, Rate] = OrderedDict()

    def check(self, address: str) -> None:
        """Before a key is looked at.

        Raises:
            WireError: 429, with the seconds to wait.
        """
        bucket = self._found.get(_network(address))
        seconds = bucket.wait() if bucket is not None else 0.0
        if seconds:
            raise WireError("too many wrong keys from this address", 429, seconds)

    def count(self, address: str) -> None:
        """A key was wrong."""
        name = _network(address)
        bucket = self._found.setdefault(name, Rate(self._rate, burst=self._burst))
        self._found.move_to_end(name)
        bucket.take()
        if len(self._found) > self._most:
            self._found.popitem(last=False)


def _network(address: str) -> str:
    """The /64 of an IPv6 address, which belongs to one customer; an IPv4 address as it is."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped:
        return str(parsed)
    return str(ipaddress.ip_network(f"{parsed}/64", strict=False))


class Bodies:
    """Reads bodies piece by piece, and refuses as soon as a limit is passed.

    Args:
        memory: Bytes of all bodies that are held at a time.
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
        """The body, which counts as held until the block ends.

        Args:
            pieces: Of the body, as they arrive.
            announced: The header Content-Length, if there is one.
            most: Most bytes of this body.

        Raises:
            WireError: 413, 408, or 429 if others hold the memory.
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
                            raise WireError("too many large requests at a time; try later", 429, 1)
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
        """Let a little more pass unread, so that the sender gets to read the refusal."""
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
    """The header: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


def _too_large(most: int) -> WireError:
    return WireError(f"the body has more than {most} bytes; send fewer rows or points", 413)
