"""Runs the service: sockets and signals."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable

import uvicorn

from flops.errors import FlopsError
from flops.serve.app import create_app
from flops.serve.http_limits import limited_protocol
from flops.serve.service import Setup

CONNECTIONS = 2048
HEAD_SECONDS = 10.0
RESERVE = 192  # file descriptors for the answer store, the model and new connections


class _Server(uvicorn.Server):
    """Calls back when listening."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def serve(setup: Setup, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until a signal; requests in flight are completed.

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
        http=limited_protocol(min(HEAD_SECONDS, setup.limits.patience), _connections()),
        backlog=128,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
        limit_concurrency=4096,
    )
    # Without this, the garbage collector traverses all objects of torch and transformers
    # repeatedly, which takes as long as all HTTP work.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, lambda: ready(url)).run(sockets=[listener])
    finally:
        listener.close()


def _connections() -> int:
    """Largest number of connections; raises the limit of file descriptors as far as allowed."""
    try:
        import resource
    except ImportError:  # no such limit on this system
        return CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    return max(16, min(CONNECTIONS, soft - RESERVE))
