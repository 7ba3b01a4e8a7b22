"""Real `flops serve` processes, for the tests of service and client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flops.serve.client import KeyedScoreRequest, ServiceClient
from tests.support.forked import Fork, start

TEXT = IMAGE = 64  # widths of the bundled model


class Server:
    """`flops serve` in a process of its own; started again, it keeps port and ledger."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        key: str | None = None,
        descriptors: int | None = None,
    ) -> None:
        self.folder, self.options, self.key = folder, options, key
        self.descriptors = descriptors  # limit of open files, which it cannot raise
        self.ledger = folder / "ledger.sqlite"
        self.port = 0
        self.process: Fork | subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        command = ["serve", "--json", "--port", str(self.port)]
        command += ["--ledger", str(self.ledger), "--threads", "1", *self.options]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        if self.key is not None:
            environment["TEST_KEY"] = self.key
            command += ["--api-key-env", "TEST_KEY"]
        self.errors = (self.folder / "stderr").open("a")
        self.process = start(command, environment, self.errors, self.descriptors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "stderr").read_text()
        self.about: dict[str, Any] = json.loads(line)
        self.url = str(self.about["url"])
        self.port = int(self.url.rsplit(":", 1)[1])

    def log(self) -> str:
        return (self.folder / "stderr").read_text()

    def kill(self, how: int = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
        return code

    def resident(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def client(self, **options: Any) -> ServiceClient:
        return ServiceClient(self.url, self.key, **{"timeout": 30.0, **options})

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill(signal.SIGTERM)


@contextmanager
def faulty(
    port: int, seed: int, share: float = 0.5
) -> Iterator[tuple[str, Callable[[], dict[str, int]]]]:
    """A spoiling proxy: its address, and how often it did what, which ends it."""
    command = [sys.executable, "-m", "tests.support.faulty_proxy"]
    command += [str(port), str(seed), str(share)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"

        def done() -> dict[str, int]:
            return json.loads(process.communicate()[0])

        try:
            yield address, done
        finally:
            if process.poll() is None:
                process.kill()


def pixels(count: int = 12) -> Tensor:
    source = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 28, 28), generator=source, dtype=torch.uint8)


def query(
    points: str, key: str, rows: int = 6, seed: int = 0, tokens: int = 4
) -> KeyedScoreRequest:
    """Rows of random points, each with prompts of its own."""
    source = torch.Generator().manual_seed(seed)
    return KeyedScoreRequest(
        points,
        torch.randint(0, 12, (rows,), generator=source),
        0.3 * torch.randn(rows, tokens, TEXT, generator=source),
        torch.arange(rows),
        0.3 * torch.randn(rows, tokens, IMAGE, generator=source),
        torch.arange(rows),
        key,
    )


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
