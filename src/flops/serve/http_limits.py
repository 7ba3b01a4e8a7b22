"""Guards connections: bounds and deadlines of request heads, and how many may be open.

uvicorn's own protocols wait for a head without end, and stop accepting when the process has no file
descriptors left, so that some thousand idle connections shut everyone out.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

HEAD = 65536  # most bytes of a request's first line and headers
PIPELINED = 64  # most requests of a connection that wait for the one before them


def _refusal(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


TOO_LARGE = _refusal("431 Request Header Fields Too Large")
TOO_SLOW = _refusal("408 Request Timeout")
TOO_MANY = _refusal("503 Service Unavailable")


class Guard:
    """Comes before a protocol of uvicorn among a class's bases.

    Attributes:
        patience: Seconds for a head to arrive, from the connection or the last answer's next byte.
        most: Open connections. One more closes the one that has been idle for longest.
    """

    patience = 10.0
    most = 2048

    # of the protocol of uvicorn
    transport: Any
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    cycle: Any
    pipeline: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.since = time.monotonic()  # when it last became idle
        self._head = 0  # bytes of a head that is not complete
        self._deaf = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Start the deadline; make room if there are too many."""
        super().connection_made(transport)  # type: ignore[misc]
        self._arm()
        if len(self.connections) <= self.most:
            return
        idle = (other for other in self.connections if other is not self and not other.busy)
        oldest = min(idle, key=lambda other: other.since, default=None)
        if oldest is None:
            self._refuse(TOO_MANY)
            return
        self.connections.discard(oldest)  # closing takes a turn of the loop
        oldest.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the deadline."""
        self._disarm()
        super().connection_lost(error)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._deaf:
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
            self._refuse(TOO_LARGE)
        elif self._deadline is None:
            self._arm()

    def on_response_complete(self) -> None:
        """An answer was sent."""
        self.since, self._head = time.monotonic(), 0
        super().on_response_complete()  # type: ignore[misc]

    def eof_received(self) -> bool:
        """Answer what was sent before the client closed its side; True keeps ours open."""
        if not self.busy or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False  # the last one; it closes the connection
        return True

    def _bound_pipeline(self) -> None:
        """Answer the oldest of too many pipelined requests, the last with Connection: close."""
        if len(getattr(self, "pipeline", ())) <= PIPELINED:
            return
        self._deaf = True
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
            self._refuse(TOO_SLOW)

    def _refuse(self, answer: bytes) -> None:
        self._deaf = True
        self.transport.write(answer)
        self.transport.close()


def guarded(patience: float, most: int) -> type[asyncio.Protocol]:
    """The protocol with the fast parser of HTTP if it is installed, else the other one."""
    base: type[asyncio.Protocol]
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as base
    return type("GuardedProtocol", (Guard, base), {"patience": patience, "most": most})
