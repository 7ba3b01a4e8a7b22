"""Plots over training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flops.optional import require
from flops.storage.files import replacing

Lines = Mapping[str, tuple[Sequence[int], Sequence[Sequence[float]]]]


def plot_over_steps(path: Path, panels: Mapping[str, Lines], label: str) -> None:
    """Plot a panel for each entry, side by side, as one PNG.

    Args:
        path: File to write.
        panels: By title, then by name of the line: its steps, and one row of values per seed. The
            line is the mean over seeds, the band their range.
        label: Label of the vertical axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figures = matplotlib_figures()
    figure = figures.Figure(figsize=(4 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (steps, values) in lines.items():
            seeds = np.asarray(values, dtype=float)  # (seeds, steps)
            (drawn,) = axis.plot(steps, seeds.mean(0), label=name, linewidth=1.5)
            axis.fill_between(
                steps, seeds.min(0), seeds.max(0), color=drawn.get_color(), alpha=0.2, linewidth=0
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    axes[-1].legend(loc="lower right")
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=110)


def matplotlib_figures() -> Any:
    """The module `matplotlib.figure`, without the global state of pyplot.

    Raises:
        MissingPackageError: If it is not installed.
    """
    return matplotlib_module("figure")


def matplotlib_module(name: str) -> Any:
    """A module of matplotlib.

    Raises:
        MissingPackageError: If it is not installed.
    """
    return require(f"matplotlib.{name}", "plots")
