"""Bounds the head of a request, which the fast parser of HTTP does not."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 65536  # most bytes of a request's first line and headers
REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """Hangs up on whoever sends headers without end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._head = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body follows."""
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        super().data_received(data)
        if self._in_head:
            self._head += len(data)
            if self._head > HEAD and not self.transport.is_closing():
                self.transport.write(REFUSAL + b"Connection: close\r\n\r\n")
                self.transport.close()
