"""`flops serve` as a child process, restarted if it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from flops.errors import FlopsError

WAIT = 120.0  # startup timeout in seconds, for loading a model


class LocalService:
    """`flops serve` on a free port of this machine, for as long as the context is open.

    Args:
        store: File of its answer store, which must outlive the process for repeats to be free.
        options: Further options of `flops serve`.

    Attributes:
        url: Its address.
        restarts: Number of restarts.
    """

    def __init__(self, store: Path, options: Sequence[str] = ()) -> None:
        self._store, self._options = store, list(options)
        self._closing = threading.Event()
        self.url, self.restarts, self._port = "", 0, 0

    def __enter__(self) -> LocalService:
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._end()
        self._watcher.join(WAIT)
        self._end()  # a restart in progress

    @property
    def process(self) -> int:
        """Current process id."""
        return self._process.pid

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _close(self._process)

    def _start(self) -> subprocess.Popen[str]:
        self._store.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flops", "serve", "--json", "--rate", "0"]
        command += [
            "--with-parent"
        ]  # else it would outlive a killed tuner and keep the store locked
        command += ["--max-ledger", str(2**20)]  # a terabyte: the disk is the user's
        command += ["--port", str(self._port), "--ledger", str(self._store), *self._options]
        log = self._store.with_suffix(".log")
        with log.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C goes to the tuner only, which sends SIGTERM
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        assert process.stdout is not None
        late = threading.Timer(WAIT, process.kill)
        late.start()
        line = process.stdout.readline()
        late.cancel()
        if not line:
            process.wait()
            said = log.read_text(encoding="utf-8", errors="replace")[-500:].strip()
            raise FlopsError(f"the service did not start: {said or 'no output'}")
        self.url = json.loads(line)["url"]
        self._port = int(self.url.rsplit(":", 1)[1])
        return process

    def _watch(self) -> None:
        """Restart it on the same port; clients retry."""
        while not self._closing.is_set():
            self._process.wait()
            if self._closing.is_set():
                return
            _close(self._process)
            self.restarts += 1
            try:
                self._process = self._start()
            except FlopsError:
                if self.restarts > 5:
                    return
                time.sleep(1.0)


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
