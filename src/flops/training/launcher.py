"""Whether `torchrun` started this process; importable without torch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def restarted() -> bool:
    """Whether torchrun has started this process again, after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
