"""The same as `align_cost` with SmolLM2-135M, batch 8; a step takes about 18 s on two cores."""

from __future__ import annotations

from typing import Any

from benchmarks import align_cost
from flops.tasks.alignment.models import smollm2_file

REPEATS = 3


def run(repeats: int = REPEATS, queries: float | None = None) -> dict[str, Any]:
    """Time and memory of three methods; nothing if the model is not installed."""
    try:
        smollm2_file()
    except FileNotFoundError as error:
        return {"not measured": {"why": str(error)}}
    return align_cost.run("smollm2", repeats, ("bp", "lr", "ops-lr"), queries)
