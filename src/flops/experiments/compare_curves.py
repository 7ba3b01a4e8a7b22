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
    found = {} if chance is None else {f"chance, {chance:.0%}": 100 * chance}
    curves = mean_curves(results)
    for method, runs in results.items():
        if variant(method).name is None:
            start = float(100 * np.mean([run["curve"][0]["accuracy"] for run in runs]))
            found[f"before training, {start:.0f}%"] = start
    if BP in curves and curves[BP].mean:
        end = curves[BP].mean[-1]
        found[f"backpropagation at the end, {end:.0f}%"] = end
    return found


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
    return Chart(title, COST, ACCURACY, drawn, levels(results, chance), log_x=True, note=note)


def plot(path: Path, results: Results, title: str = "", chance: float | None = None) -> None:
    """Plot validation accuracy against forward equivalents: mean and range over seeds.

    Backpropagation and ours are drawn on top; the legend is below. Readable at half the width of a
    page.

    Args:
        path: File to write.
        results: Results of the seeds, by method.
        title: Title.
        chance: Accuracy of guessing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    curves, ticker = mean_curves(results), matplotlib_module("ticker")
    rows = -(-(len(curves) + len(levels(results, chance))) // 2)
    figure = matplotlib_figures().Figure(figsize=(6.4, 3.9 + 0.23 * rows), layout="constrained")
    axis = figure.subplots()
    colours = iter(COLOURS * len(curves))
    for method, found in curves.items():
        kind = variant(method)
        ahead = kind.name in (BP, OURS)
        (line,) = axis.plot(
            found.cost,
            found.mean,
            label=method_name(method),
            color=("black" if kind.name == BP else "tab:red") if ahead else next(colours),
            linestyle="--" if "+" in method else "-",
            linewidth=2.4 if ahead else 1.5,
            marker="o",
            markersize=4,
            zorder=3 if ahead else 2,
        )
        band = {"color": line.get_color(), "alpha": 0.12, "linewidth": 0}
        axis.fill_between(found.cost, found.low, found.high, **band)
    styles = (":", "-.", "--", (0, (1, 3)))
    for style, (name, level) in zip(styles, levels(results, chance).items(), strict=False):
        axis.axhline(level, label=name, color="grey", linestyle=style, linewidth=1.2, zorder=1)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    ticks = Scale(low, high, 0, 1, log=True).ticks()
    axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axis.xaxis.set_major_formatter(ticker.FixedFormatter([short(tick) for tick in ticks]))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel(COST, fontsize=11)
    axis.set_ylabel(ACCURACY, fontsize=11)
    axis.tick_params(labelsize=10)
    figure.suptitle(title or "Accuracy against cost", fontsize=12)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)


def _seeds(results: Results) -> int:
    return max((len(runs) for runs in results.values()), default=0)
