"""Time and memory of a step of alignment by method, with and without allocator.

`lr` and `ops-lr` differ only in the allocator. Steps of all methods are interleaved in one process,
so that other load affects all equally; "over lr" is the median of the ratios per turn. Memory is
measured in a separate process per method: the peak during a step over the resident memory with both
models loaded and one step done, that is, activations, noise and gradients.

    python -m benchmarks align_cost              the embedded models
    python -m benchmarks align_cost_smollm2      SmolLM2-135M, batch 8 (after `make real-models`)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

from rich.progress import track

from benchmarks.memory import ENVIRONMENT, peak
from benchmarks.timing import interleaved, median_and_spread, ratios
from flops.tasks.alignment.config import PRESETS, AlignConfig
from flops.training.trainer import Trainer

METHODS = ("bp", "lr", "ops-lr", "shaped-lr", "ops-spsa")
REPEATS = 60


def settings(model: str, method: str, queries: float | None = None) -> AlignConfig:
    """Settings of a method; with many epochs, so that the steps never end."""
    given: dict[str, Any] = {**PRESETS[model], "method": method, "epochs": 1000}
    if queries is not None:
        given["queries"] = queries
    return AlignConfig(**given)


def child(model: str, method: str, queries: float | None) -> dict[str, float]:
    """Measure the memory of one method in this process."""
    warnings.simplefilter("ignore")
    trainer = Trainer(settings(model, method, queries))
    trainer.step()
    trainer.optimizer.zero_grad()
    return {"step adds, MB": peak(trainer.step) / 2**20}


def memory(model: str, method: str, queries: float | None = None) -> dict[str, float]:
    """Measure the memory of one method in a separate process."""
    command = [sys.executable, "-m", "benchmarks.align_cost", model, method, str(queries)]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=os.environ | ENVIRONMENT
    )
    if done.returncode:
        raise RuntimeError(f"memory of {method}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(
    model: str = "tiny",
    repeats: int = REPEATS,
    methods: tuple[str, ...] = METHODS,
    queries: float | None = None,
) -> dict[str, Any]:
    """Time and memory of all methods."""
    trainers = {method: Trainer(settings(model, method, queries)) for method in methods}
    steps = {method: trainer.step for method, trainer in trainers.items()}
    seconds = interleaved(steps, repeats, warm=2)
    del trainers, steps
    found: dict[str, Any] = {}
    for method in track(methods, description="align_cost", transient=True):
        middle, spread = median_and_spread(seconds[method])
        over = ratios(seconds[method], seconds["lr"]) if "lr" in methods else [1.0]
        found[method] = {
            "s per step": middle,
            "spread": spread,
            "over lr": sorted(over)[len(over) // 2],
        }
        found[method] |= memory(model, method, queries)
    if "bp" in found:
        for row in found.values():
            row["memory over bp"] = row["step adds, MB"] / found["bp"]["step adds, MB"]
    return found


if __name__ == "__main__":
    given = None if sys.argv[3] == "None" else float(sys.argv[3])
    print(json.dumps(child(sys.argv[1], sys.argv[2], given)))
