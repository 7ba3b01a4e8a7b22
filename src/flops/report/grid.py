"""Figures of means with their intervals: a grid of curves, and groups of bars.

They are legible in black and white: every line has its own marker and dash pattern, every bar its
own hatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flops.report.intervals import Interval
from flops.report.plots import matplotlib_figures, matplotlib_module
from flops.storage.files import replacing

Curves = Mapping[str, Sequence[Interval]]
STYLES: tuple[tuple[str, Any], ...] = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"))
STYLES += (("v", (0, (5, 1))), ("P", (0, (3, 5))), ("X", (0, (1, 3))), ("*", (0, (8, 2, 1, 2))))
HATCHES = ("", "///", "...", "xxx")
DPI = 130


def plot_grid(
    path: Path,
    panels: Mapping[tuple[str, str], Curves],
    at: Sequence[int],
    title: str,
    labels: tuple[str, str],
) -> None:
    """Plot curves against a logarithmic axis, a panel for each (row, column), as one PNG.

    Args:
        path: File to write.
        panels: By row and column: the curves by name, one interval for each x value.
        at: Values on the horizontal axis.
        title: Title of the figure.
        labels: Labels of the horizontal and the vertical axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = list(dict.fromkeys(row for row, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    size = (0.9 + 3.0 * len(columns), 1.1 + 2.2 * len(rows))
    figure = matplotlib_figures().Figure(figsize=size, layout="constrained")
    ticker = matplotlib_module("ticker")
    # Rows may differ by a factor of ten: each has its own scale, shared by its columns.
    axes = figure.subplots(len(rows), len(columns), sharex=True, sharey="row", squeeze=False)
    handles: dict[str, Any] = {}
    for (row, column), curves in panels.items():
        axis = axes[rows.index(row)][columns.index(column)]
        for number, (name, values) in enumerate(curves.items()):
            marker, dashes = STYLES[number % len(STYLES)]
            # Shifted, so that intervals do not overlap.
            places = [x * 1.035 ** (number - (len(curves) - 1) / 2) for x in at]
            handles[name] = axis.errorbar(
                places,
                [value.mean for value in values],
                yerr=[_half(value) for value in values],
                marker=marker,
                markersize=4.5,
                markerfacecolor="white" if number % 2 else None,
                linestyle=dashes,
                linewidth=1.3,
                elinewidth=0.8,
                capsize=2,
            )
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.FixedLocator(list(at)))
        axis.xaxis.set_major_formatter(ticker.FixedFormatter([str(x) for x in at]))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.MaxNLocator(5))
        axis.grid(alpha=0.3)
    for axis, column in zip(axes[0], columns, strict=True):
        axis.set_title(column, fontsize=10)
    for line, row in zip(axes, rows, strict=True):
        line[0].set_ylabel(f"{row}\n{labels[1]}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel(labels[0], fontsize=9)
    figure.suptitle(title, fontsize=11)
    shown = (list(handles.values()), list(handles))
    figure.legend(*shown, loc="outside lower center", ncols=len(handles), frameon=False)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=DPI)


def plot_bars(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]],
    title: str,
    label: str,
) -> None:
    """Plot groups of bars with their intervals, a panel for each entry, as one PNG.

    Args:
        path: File to write.
        panels: By title, then by group on the horizontal axis, then by name of the bar.
        title: Title of the figure.
        label: Label of the vertical axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    most = max(len(groups) for groups in panels.values())
    size = (1.0 + max(3.0, 1.0 * most) * len(panels), 3.6)
    figure = matplotlib_figures().Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axis, (name, groups) in zip(axes, panels.items(), strict=True):
        bars = list(dict.fromkeys(bar for group in groups.values() for bar in group))
        width = 0.8 / len(bars)
        for number, bar in enumerate(bars):
            present = [(x, group[bar]) for x, group in enumerate(groups.values()) if bar in group]
            handles[bar] = axis.bar(
                [x + (number - (len(bars) - 1) / 2) * width for x, _ in present],
                [value.mean for _, value in present],
                width,
                yerr=[_half(value) for _, value in present],
                capsize=3,
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor="black",
                linewidth=0.7,
                alpha=0.75,
            )
        axis.set_xticks(range(len(groups)), list(groups), fontsize=9)
        axis.axhline(0, color="black", linewidth=0.7)
        axis.set_title(name, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel(label)
    figure.suptitle(title, fontsize=11)
    shown = (list(handles.values()), list(handles))
    figure.legend(*shown, loc="outside lower center", ncols=len(handles), frameon=False)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=DPI)


def _half(value: Interval) -> float:
    return 0.0 if math.isinf(value.half) else value.half
