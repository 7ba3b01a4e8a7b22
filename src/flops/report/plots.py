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
    figure = figures.Figure(figsize=(0.6 + 3.4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    colours: dict[str, str] = {}
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (steps, values) in lines.items():
            seeds = np.asarray(values, dtype=float)  # (seeds, steps)
            colour = colours.setdefault(name, f"C{len(colours)}")  # the same in all panels
            (drawn,) = axis.plot(steps, seeds.mean(0), color=colour, linewidth=1.8)
            handles[name] = drawn
            axis.fill_between(
                steps, seeds.min(0), seeds.max(0), color=drawn.get_color(), alpha=0.2, linewidth=0
            )
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step", fontsize=11)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(label, fontsize=11)
    columns = max(1, min(len(handles), 2 * len(panels)))
    shown = {"ncols": columns, "frameon": False, "fontsize": 10}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **shown)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)


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
