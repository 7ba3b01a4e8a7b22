"""Commands that start several processes of a test."""

from __future__ import annotations

import sys


def torchrun(*command: str, processes: int = 2) -> list[str]:
    """A Python command in that many processes of one group."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={processes}", *command]
