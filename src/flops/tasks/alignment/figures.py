"""Compares runs of `flops align`: loss by step and by time, from their metrics.jsonl."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops.report.curves import read_metrics
from flops.report.names import method_name
from flops.report.plots import matplotlib_figures
from flops.storage.files import replacing


@dataclass(frozen=True)
class AlignedRun:
    """Results of a run.

    Attributes:
        first: Validation loss of the initial adapter.
        last: Validation loss at the end.
        accuracy: Caption accuracy at the end.
        test: Caption accuracy on the test split; None if it was not evaluated.
        step_seconds: Median time of a step.
        steps: Step of each evaluation; `losses`, `seconds` and `forwards` are parallel to it.
    """

    first: float
    last: float
    accuracy: float
    test: float | None
    step_seconds: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    forwards: tuple[float, ...]

    def to_loss(self, loss: float) -> tuple[float, float] | None:
        """Seconds and forward equivalents until the validation loss reached this value.

        Interpolated linearly between evaluations. None if it was never reached.
        """
        pairs = itertools.pairwise(zip(self.losses, self.seconds, self.forwards, strict=True))
        for (above, t0, f0), (below, t1, f1) in pairs:
            if below <= loss:
                way = 0.0 if above <= loss else (above - loss) / (above - below)
                return t0 + way * (t1 - t0), f0 + way * (f1 - f0)
        return None


def read_run(folder: Path) -> AlignedRun:
    """Read a finished run.

    Raises:
        ValueError: If it was never evaluated.
    """
    steps, evaluations = read_metrics(folder / "metrics.jsonl")
    if not evaluations:
        raise ValueError(f"the run in {folder} has no evaluation yet; finish it first")
    times = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(steps)]
    last = evaluations[-1]
    return AlignedRun(
        evaluations[0]["loss"],
        last["loss"],
        last["accuracy"],
        last["test"],
        statistics.median(times) if times else 0.0,
        *(
            tuple(e[name] for e in evaluations)
            for name in ("step", "loss", "seconds", "forward_equivalents")
        ),
    )


def plot_aligned(runs: Mapping[str, Sequence[AlignedRun]], path: Path) -> None:
    """Draw the validation loss against steps and against time; a thin line for every seed.

    Args:
        runs: By name, one for each seed.
        path: File to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = matplotlib_figures().Figure(figsize=(8.4, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for number, (name, seeds) in enumerate(runs.items()):
        for seed, run in enumerate(seeds):
            style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.2, "alpha": 0.8}
            label = method_name(name) if seed == 0 else None
            by_step.plot(run.steps, run.losses, label=label, **style)
            by_time.plot(run.seconds[1:], run.losses[1:], **style)
    by_step.set_ylabel("validation loss per caption token")
    by_step.set_xlabel("step")
    by_time.set_xlabel("training time, s")
    by_time.set_xscale("log")
    by_step.set_title("By step", fontsize=11)
    by_time.set_title("By time", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    for axis in (by_step, by_time):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)
