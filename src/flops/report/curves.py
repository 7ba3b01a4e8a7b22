"""Plot of loss and accuracy of a run against its cost, from metrics.jsonl."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from flops.report.plots import matplotlib_module
from flops.storage.files import replacing
from flops.storage.plain import parse_object

NEEDED = {  # numbers in the lines of each kind
    "step": ("step", "loss", "forward_equivalents", "seconds"),
    "evaluation": ("step", "loss", "accuracy", "forward_equivalents", "seconds"),
}
SMOOTH = 20  # steps of the running mean, at most a twentieth of the run


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of steps and of evaluations, in order; an incomplete last line is skipped.

    Invalid lines are skipped with a warning.

    Raises:
        OSError: If the file cannot be read.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in NEEDED}
    broken: list[str] = []
    lines = path.read_bytes().split(b"\n")[:-1]  # the rest after the last newline is incomplete
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_object(line)
            kind = str(value.get("kind"))
            if wrong := [name for name in NEEDED[kind] if not _is_number(value.get(name, ""))]:
                raise ValueError(f"no number as {wrong[0]}")
            found[kind].append({"test": None, **value})
        except KeyError:
            broken.append(f"line {number} (neither a step nor an evaluation)")
        except ValueError as error:
            broken.append(f"line {number} ({error})")
    if broken:
        warnings.warn(
            f"skipped {len(broken)} of {len(lines)} lines of {path} that cannot be read, the "
            f"first: {broken[0]}",
            stacklevel=2,
        )
    return found["step"], found["evaluation"]


def _is_number(value: Any) -> bool:
    """Whether it is a number, or None, which stands for a non-finite one."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def plot_curves(metrics: Path, path: Path, *, title: str = "", chance: float | None = None) -> None:
    """Plot the training loss and the validation accuracy against forward equivalents.

    Args:
        metrics: The metrics.jsonl of a run.
        path: File to write.
        title: Title of the figure.
        chance: Accuracy of guessing, drawn as a line; None for no line.

    Raises:
        ImportError: matplotlib is not installed.
    """
    steps, evaluations = read_metrics(metrics)
    ticker = matplotlib_module("ticker")
    figure = matplotlib_module("figure").Figure(figsize=(8.4, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    cost = _numbers(steps, "forward_equivalents")
    losses = _numbers(steps, "loss")
    (drawn,) = left.plot(cost, losses, linewidth=0.8, alpha=0.35, label="each step")
    mean = _running_mean(losses)
    left.plot(cost, mean, linewidth=2, color=drawn.get_color(), label="running mean")
    left.set_title("Training loss", fontsize=12)
    left.set_ylabel("loss", fontsize=11)
    right.plot(
        _numbers(evaluations, "forward_equivalents"),
        100 * _numbers(evaluations, "accuracy"),
        marker="o",
        markersize=5,
        linewidth=2,
        label="validation",
    )
    if chance is not None:
        right.axhline(
            100 * chance, color="grey", linestyle=":", linewidth=1.5, label=f"chance, {chance:.0%}"
        )
    right.set_title("Validation accuracy", fontsize=12)
    right.set_ylabel("accuracy, %", fontsize=11)
    for axis in (left, right):
        axis.set_xlabel("cost in forward equivalents", fontsize=11)
        axis.tick_params(labelsize=10)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))  # 200k
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        shown = {"frameon": False, "fontsize": 10, "ncols": 2}
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), **shown)
    figure.suptitle(title, fontsize=12)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)


def _numbers(lines: list[dict[str, Any]], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One value of each line, NaN for None."""
    return np.array([line[name] for line in lines], dtype=np.float64)


def _running_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    """Running mean over the last steps."""
    width = max(1, min(SMOOTH, len(values) // 20))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    return (sums[end] - sums[start]) / (end - start)
