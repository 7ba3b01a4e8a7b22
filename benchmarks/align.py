"""Alignment of the embedded models: loss, accuracy and time of each method in the same steps.

The bundled encoder and language model, 60 queries per point, three seeds; all methods use the
learning rate chosen for backpropagation on the validation split. "of bp's reduction" is the
reduction of the validation loss over that of backpropagation with the same seed. Time and cost are
per step, and until a loss that all methods reach: forward learning needs no backward pass and
little memory, at the cost of queries. Controls are trained on shuffled images; chance is 10 %.

Runs are saved in runs/align and can be resumed; the plot is made from their metrics.
"""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import Any

from rich.progress import track

from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.figures import AlignedRun, plot_aligned, read_run
from flops.training.loop import train
from flops.training.run_directory import is_run

METHODS = ("bp", "shaped-lr", "ops-lr", "lr", "ops-spsa")
CONTROLS = ("bp", "shaped-lr")
SEEDS = 3
FOLDER = Path("runs/align")


def finished(config: AlignConfig) -> AlignedRun:
    """The run with these settings, started or resumed if not finished."""
    folder = Path(str(config.output))
    if not (folder / "report.md").is_file():
        train(config, resume=is_run(folder))
    return read_run(folder)


def cases(seeds: int, base: AlignConfig, folder: Path) -> dict[str, list[AlignConfig]]:
    """Settings by name, one per seed."""
    named: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS}
    named |= {f"{m}, shuffled": {"method": m, "shuffled": True} for m in CONTROLS}
    settings = base.to_dict()
    return {
        name: [
            AlignConfig(
                **settings
                | given
                | {
                    "seed": seed,
                    "sigma": base.sigma,
                    "marks": (),
                    "test": True,
                    "output": str(folder / f"{name.replace(', ', '-')}-seed{seed}"),
                }
            )
            for seed in range(seeds)
        ]
        for name, given in named.items()
    }


def run(
    seeds: int = SEEDS, base: AlignConfig | None = None, folder: Path = FOLDER
) -> dict[str, Any]:
    """All methods and controls."""
    found: dict[str, list[AlignedRun]] = {}
    planned = cases(seeds, base or AlignConfig(), folder)
    for name in track(planned, description="align", transient=True):
        found[name] = [finished(config) for config in planned[name]]
    drawn = {name: runs for name, runs in found.items() if "shuffled" not in name}
    try:
        plot_aligned(drawn, folder / "align.png")
    except ImportError as error:
        warnings.warn(f"no plot was drawn: {error}", stacklevel=2)
    reached = max(run.last for runs in drawn.values() for run in runs)
    return {name: _row(runs, found["bp"], reached) for name, runs in found.items()}


def _row(runs: list[AlignedRun], exact: list[AlignedRun], loss: float) -> dict[str, Any]:
    mean = statistics.fmean
    shares = [
        (run.first - run.last) / (bp.first - bp.last) for run, bp in zip(runs, exact, strict=True)
    ]
    ways = [way for run in runs if (way := run.to_loss(loss)) is not None]
    reached = len(ways) == len(runs)
    return {
        "loss": mean(run.last for run in runs),
        "loss, spread": statistics.pstdev(run.last for run in runs),
        "of bp's reduction": mean(shares),
        "least": min(shares),
        "caption accuracy": mean(run.accuracy for run in runs),
        "test": mean(run.test for run in runs if run.test is not None),
        "s per step": mean(run.step_seconds for run in runs),
        f"s to loss {loss:.3f}": mean(way[0] for way in ways) if reached else None,
        "forwards to that loss": mean(way[1] for way in ways) if reached else None,
    }
