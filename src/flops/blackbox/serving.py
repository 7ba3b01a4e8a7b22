"""Runs the service: sockets and signals."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Literal

import uvicorn

from flops.blackbox.service import create_app
from flops.blackbox.state import Setup
from flops.errors import FlopsError


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def serve(setup: Setup, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until a signal says to stop; requests that are in the house are answered.

    Args:
        setup: The service.
        host: Address to listen on.
        port: Port; 0 for a free one.
        ready: Called with the address when connections are accepted.

    Raises:
        FlopsError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise FlopsError(f"cannot listen on {host} port {port}: {error}") from error
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(setup),
        http=_protocol(),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
        limit_concurrency=4096,
    )
    # What is loaded stays: without this, the collector walks through all of torch and transformers
    # again and again, which takes as long as all of HTTP.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, lambda: ready(url)).run(sockets=[listener])
    finally:
        listener.close()


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """The fast parser of HTTP if it is installed; the other one bounds heads by itself."""
    try:
        from flops.blackbox.guarding import GuardedProtocol
    except ImportError:
        return "h11"
    return GuardedProtocol
