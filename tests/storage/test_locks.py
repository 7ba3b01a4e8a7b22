"""Lock files: one holder at a time, across processes, gone with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from filelock import Timeout

from flops.storage.locks import acquire_lock

HOLD = """
import os, sys
from pathlib import Path
from flops.storage.locks import acquire_lock
lock = acquire_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read(1)
os._exit(1)  # without releasing it
"""


def test_a_lock_has_one_holder_and_goes_with_its_process(tmp_path) -> None:
    path = tmp_path / "some.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Timeout):
            acquire_lock(path)
        other.communicate("x")
    lock = acquire_lock(path, timeout=5)
    with pytest.raises(Timeout):
        acquire_lock(path)
    lock.release()
    acquire_lock(path).release()
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
