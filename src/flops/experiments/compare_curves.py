"""The picture of a comparison: accuracy against cost, for the folder and for the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flops.experiments.compare_methods import BP, variant
from flops.report.names import method_name
from flops.report.plots import matplotlib_figures, matplotlib_module
from flops.report.scales import Scale, short
from flops.report.svg import Chart, Curve
from flops.storage.files import replacing

Results = Mapping[str, Sequence[Mapping[str, Any]]]
OURS = "shaped-lr"
COST = "cost in forward passes of one point"
ACCURACY = "validation accuracy, %"
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:cyan")
GREY = "grey"
MARKED = 30  # points of a curve with markers; more would run into each other
DASHES = {"chance": ":", "before training": "--", "backpropagation at the end": "-."}


@dataclass(frozen=True)
class MeanCurve:
    """Validation accuracy of a method in percent: mean, lowest and highest over the seeds."""

    cost: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def mean_curves(results: Results) -> dict[str, MeanCurve]:
    """Curves of the trained methods, from the first evaluation after a step on."""
    found = {}
    for method, runs in results.items():
        if variant(method).name is None:
            continue
        curves = [run["curve"] for run in runs]
        length = min(map(len, curves))
        shown = [i for i in range(length) if curves[0][i]["step"] > 0]
        cost = [[c[i]["forward_equivalents"] for i in shown] for c in curves]
        score = 100 * np.array([[c[i]["accuracy"] for i in shown] for c in curves])
        columns = (np.mean(cost, axis=0), score.mean(0), score.min(0), score.max(0))
        found[method] = MeanCurve(*(tuple(column.tolist()) for column in columns))
    return found


def levels(results: Results, chance: float | None) -> dict[str, float]:
    """Horizontal lines: chance, the unmodified model, and where backpropagation ends."""
    found = {} if chance is None else {"chance": 100 * chance}
    curves = mean_curves(results)
    for method, runs in results.items():
        if variant(method).name is None:
            start = float(100 * np.mean([run["curve"][0]["accuracy"] for run in runs]))
            found["before training"] = start
    if BP in curves and curves[BP].mean:
        found["backpropagation at the end"] = curves[BP].mean[-1]
    return found


def numbered(found: Mapping[str, float]) -> dict[str, float]:
    """Horizontal lines whose names have their values."""
    return {f"{name}, {level:.0f}%": level for name, level in found.items()}


def chart(results: Results, chance: float | None = None) -> Chart:
    """The chart of the report page."""
    drawn = [
        Curve(
            method_name(method),
            list(zip(found.cost, found.mean, strict=True)),
            slot,
            list(zip(found.low, found.high, strict=True)),
            marked=True,
        )
        for slot, (method, found) in enumerate(mean_curves(results).items())
    ]
    title = "Accuracy against cost"
    note = "Mean and range over the seeds." if _seeds(results) > 1 else ""
    lines = numbered(levels(results, chance))
    return Chart(title, COST, ACCURACY, drawn, lines, log_x=True, note=note)


@dataclass(frozen=True)
class Panel:
    """One comparison of a picture."""

    title: str
    results: Results
    chance: float | None = None


def plot(path: Path, *panels: Panel) -> None:
    """Plot validation accuracy against forward equivalents: mean and range over seeds.

    Comparisons are side by side; a method looks the same in all of them. Backpropagation and ours
    are drawn on top; the legend is below. Readable at half the width of a page.

    Args:
        path: File to write.
        panels: The comparisons.

    Raises:
        ImportError: matplotlib is not installed.
    """
    styles = _styles([m for panel in panels for m in mean_curves(panel.results)])
    alone = len(panels) == 1
    rows = -(-(len(styles) + 3) // (2 if alone else 3))
    width = 6.4 if alone else 4.7 * len(panels)
    figure = matplotlib_figures().Figure(figsize=(width, 3.9 + 0.23 * rows), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        title = panel.title or "Accuracy against cost"
        axis.set_title(title, fontsize=12)
        handles |= _draw(axis, panel, styles, numbers=alone)
    axes[0].set_ylabel(ACCURACY, fontsize=11)
    lines = {name: line for name, line in handles.items() if line.get_color() == GREY}
    shown = {name: line for name, line in handles.items() if name not in lines} | lines
    figure.legend(
        shown.values(),
        shown,
        loc="outside lower center",
        ncols=2 if alone else 3,
        fontsize=10,
        frameon=False,
    )
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each method is drawn."""
    colours, found = iter(COLOURS * len(methods)), {}
    for method in dict.fromkeys(methods):
        name = variant(method).name
        ahead = name in (BP, OURS)
        found[method] = {
            "label": method_name(method),
            "color": ("black" if name == BP else "tab:red") if ahead else next(colours),
            "linestyle": "--" if "+" in method else "-",
            "linewidth": 2.4 if ahead else 1.5,
            "markersize": 4,
            "zorder": 3 if ahead else 2,
        }
    return found


def _draw(
    axis: Any, panel: Panel, styles: Mapping[str, dict[str, Any]], numbers: bool
) -> dict[str, Any]:
    """Draw one comparison; returns its lines by name."""
    found = {}
    for method, curve in mean_curves(panel.results).items():
        marker = "o" if len(curve.cost) <= MARKED else None
        (line,) = axis.plot(curve.cost, curve.mean, marker=marker, **styles[method])
        found[line.get_label()] = line
        band = {"color": line.get_color(), "alpha": 0.12, "linewidth": 0}
        axis.fill_between(curve.cost, curve.low, curve.high, **band)
    lines = levels(panel.results, panel.chance)
    for name, shown in zip(lines, numbered(lines) if numbers else lines, strict=True):
        style = {"color": GREY, "linestyle": DASHES[name], "linewidth": 1.2, "zorder": 1}
        found[shown] = axis.axhline(lines[name], **style)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    ticker = matplotlib_module("ticker")
    ticks = Scale(low, high, 0, 1, log=True).ticks()
    axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axis.xaxis.set_major_formatter(ticker.FixedFormatter([short(tick) for tick in ticks]))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel(COST, fontsize=11)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    return found


def _seeds(results: Results) -> int:
    return max((len(runs) for runs in results.values()), default=0)
