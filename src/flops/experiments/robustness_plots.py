"""Plot of the study of robustness: accuracy against the attack's bound."""

from __future__ import annotations

import math
from pathlib import Path

from flops.experiments.robustness_tables import TITLES, Found
from flops.experiments.robustness_trials import ATTACKS, Strengths
from flops.report.grid import STYLES
from flops.report.intervals import interval
from flops.report.names import method_name
from flops.report.plots import matplotlib_figures
from flops.storage.files import replacing

# Distinguishable without colour: by marker and line.


def plot_bounds(path: Path, found: Found, strengths: Strengths) -> None:
    """Plot accuracy (top) and relative accuracy (bottom) against the bound, one column per attack.

    Args:
        path: File to write.
        found: All results.
        strengths: Strengths with the bounds; 0 is the accuracy on clean images.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = matplotlib_figures().Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, len(ATTACKS), sharex=True, sharey="row")
    bounds = strengths.all_bounds
    for column, kind in enumerate(ATTACKS):
        for row, values in enumerate((found.accuracy, found.relative)):
            axis = axes[row][column]
            for method, (marker, line) in zip(found.methods, STYLES, strict=False):
                seeds = [values(method, "clean", 0.0), *(values(method, kind, b) for b in bounds)]
                points = [interval(list(one.values())) for one in seeds]
                if any(math.isnan(point.mean) for point in points):
                    continue  # zero accuracy on clean images
                axis.errorbar(
                    [0.0, *bounds],
                    [point.mean for point in points],
                    [point.spread for point in points],
                    marker=marker,
                    linestyle=line,
                    markersize=5,
                    linewidth=1.4,
                    capsize=2.5,
                    label=method_name(method),
                )
            axis.grid(alpha=0.3)
            axis.set_ylim(-3, None if row else 103)  # by chance, noise may help
        axes[0][column].set_title(TITLES[kind])
        axes[1][column].set_xlabel("bound, 1/255")
        axes[1][column].set_xticks([0.0, *bounds])
    axes[0][0].set_ylabel("test accuracy, %")
    axes[1][0].set_ylabel("relative accuracy, % of clean")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(len(labels), 3), handlelength=4
    )
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=120)
