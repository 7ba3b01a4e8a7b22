"""HTTP limits: size and deadline of request headers, and open connections.

uvicorn's protocols have no timeout for headers, and stop accepting when the process runs out of
file descriptors, so that a few thousand idle connections block all clients.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

HEAD = 65536  # largest size of request line and headers, in bytes
PIPELINED = 64  # largest number of pipelined requests per connection


def _error(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


TOO_LARGE = _error("431 Request Header Fields Too Large")
TOO_SLOW = _error("408 Request Timeout")
TOO_MANY = _error("503 Service Unavailable")


class HTTPLimits:
    """Mixin for a protocol of uvicorn.

    Attributes:
        patience: Seconds for headers to arrive, from the connection or the first byte.
        most: Largest number of open connections. One more closes the one idle for longest.
    """

    patience = 10.0
    most = 2048

    # attributes of the protocol
    transport: Any
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    cycle: Any
    pipeline: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.since = time.monotonic()  # when it last became idle
        self._head = 0  # bytes of incomplete headers
        self._closed = False  # ignores further data
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being received or processed."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Start the deadline; close an idle connection if there are too many."""
        super().connection_made(transport)  # type: ignore[misc]
        self._arm()
        if len(self.connections) <= self.most:
            return
        idle = (other for other in self.connections if other is not self and not other.busy)
        oldest = min(idle, key=lambda other: other.since, default=None)
        if oldest is None:
            self._reject(TOO_MANY)
            return
        self.connections.discard(oldest)  # it closes in the next iteration of the loop
        oldest.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the deadline."""
        self._disarm()
        super().connection_lost(error)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        if self._closed:
            return
        super().data_received(data)  # type: ignore[misc]
        if self.transport.is_closing():
            return
        if self.busy:
            self._head = 0
            self._disarm()
            self._bound_pipeline()
            return
        self._head += len(data)
        if self._head > HEAD:
            self._reject(TOO_LARGE)
        elif self._deadline is None:
            self._arm()

    def on_response_complete(self) -> None:
        """A response was sent."""
        self.since, self._head = time.monotonic(), 0
        super().on_response_complete()  # type: ignore[misc]

    def eof_received(self) -> bool:
        """Answer requests sent before the client closed its side; True keeps ours open."""
        if not self.busy or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False  # the last one; it closes the connection
        return True

    def _bound_pipeline(self) -> None:
        """Answer the oldest of too many pipelined requests, the last with Connection: close."""
        if len(getattr(self, "pipeline", ())) <= PIPELINED:
            return
        self._closed = True
        while len(self.pipeline) > PIPELINED:
            self.pipeline.popleft()
        self.cycle = self.pipeline[0][0]  # the newest is on the left
        self.cycle.keep_alive = False

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.patience, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self.busy and not self.transport.is_closing():
            self._reject(TOO_SLOW)

    def _reject(self, response: bytes) -> None:
        self._closed = True
        self.transport.write(response)
        self.transport.close()


def limited_protocol(patience: float, most: int) -> type[asyncio.Protocol]:
    """Uvicorn's httptools protocol if that is installed, else its h11 one, with these limits."""
    base: type[asyncio.Protocol]
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as base
    return type("LimitedProtocol", (HTTPLimits, base), {"patience": patience, "most": most})
