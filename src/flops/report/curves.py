"""Loss and accuracy of a run against its cost, drawn from metrics.jsonl alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from flops.report.plots import matplotlib_module

SMOOTH = 20  # steps of the running mean, at most a twentieth of the run


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of steps and lines of evaluations, in order; a last line that was cut off is left out.

    Raises:
        ValueError: If another line is not JSON.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    values = [json.loads(line) for line in lines[:-1]]  # what follows the last newline is not whole
    steps = [value for value in values if value["kind"] == "step"]
    return steps, [value for value in values if value["kind"] == "evaluation"]


def plot_curves(metrics: Path, path: Path) -> None:
    """Draw the training loss and the validation accuracy against forward equivalents.

    Args:
        metrics: The metrics.jsonl of a run.
        path: Where the picture goes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    steps, evaluations = read_metrics(metrics)
    ticker = matplotlib_module("ticker")
    figure = matplotlib_module("figure").Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    cost = [line["forward_equivalents"] for line in steps]
    losses = np.array([line["loss"] for line in steps], dtype=float)
    (drawn,) = left.plot(cost, losses, linewidth=0.8, alpha=0.35)
    left.plot(cost, _running_mean(losses), linewidth=1.8, color=drawn.get_color())
    left.set_ylabel("training loss")
    right.plot(
        [line["forward_equivalents"] for line in evaluations],
        [100 * line["accuracy"] for line in evaluations],
        marker="o",
        markersize=4,
    )
    right.set_ylabel("validation accuracy (%)")
    for axis in (left, right):
        axis.set_xlabel("forward equivalents")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(6))
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 200k
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _running_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    """Mean over the last steps."""
    width = max(1, min(SMOOTH, len(values) // 20))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    return (sums[end] - sums[start]) / (end - start)
