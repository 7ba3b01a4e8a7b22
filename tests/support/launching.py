"""Commands that start processes of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flops


def python(*command: object) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with the package under test importable."""
    source = str(Path(flops.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )


def torchrun(*command: str, processes: int = 2) -> list[str]:
    """A Python command in that many processes of one group."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={processes}", *command]
