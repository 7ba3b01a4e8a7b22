"""Two hosts on this machine: network namespaces of their own, with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A network namespace, its end of the cable, and its address there."""

    name: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command on this host; gloo uses the cable."""
        inside = ["ip", "netns", "exec", self.name, "env", f"GLOO_SOCKET_IFNAME={self.interface}"]
        return [*inside, *command]

    def unplug(self) -> None:
        """Cut the cable: no connection is closed, nothing arrives any more."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts that reach each other; their processes must end before they go.

    Raises:
        PermissionError: If this user or machine cannot make them.
    """
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise PermissionError("network namespaces need root and iproute2")
    number = os.getpid()
    hosts = [Host(f"flops-{number}-{i}", f"f{number % 10**6}-{i}", f"10.77.0.{i}") for i in (1, 2)]
    a, b = hosts
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            _ip("link", "add", a.interface, "type", "veth", "peer", "name", b.interface)
            for host in hosts:
                _ip("link", "set", host.interface, "netns", host.name)
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            raise PermissionError(error.stderr) from error
        yield hosts
    finally:
        with suppress(subprocess.CalledProcessError):  # as long as it is not in a namespace
            _ip("link", "delete", a.interface)
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
