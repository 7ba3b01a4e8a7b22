"""Plot of the query allocation: a histogram, and the points of both extremes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flops.report.counts import SHOWN, Extreme, QueryCounts, read_counts
from flops.report.plots import matplotlib_figures, matplotlib_module
from flops.storage.files import replacing

WIDE = 10  # ratio of counts above which the axis is logarithmic
BARS = 40  # of the histogram
COLUMNS = SHOWN // 2  # thumbnails in a row
TEXTS = 4  # texts per extreme
CHARACTERS = 92  # of a text, in a line of the figure


def plot_allocation(counts: Path, path: Path) -> None:
    """Plot a histogram of queries per point, and the points with most and fewest.

    Args:
        counts: A file of `flops.report.counts`.
        path: File to write.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be read.
        ValueError: It is not a file of counts.
    """
    found = read_counts(counts)
    pictures = found.kind == "image"
    below = [2.5, 2.5] if pictures else [1.3, 1.3] if found.most.texts else []
    heights = [2.9, *below]
    figure = matplotlib_figures().Figure(figsize=(6.5, sum(heights)), layout="constrained")
    top, *rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _histogram(top.subplots(), found)
    extremes = {"most": found.most, "fewest": found.least}
    for row, (name, extreme) in zip(rows, extremes.items(), strict=False):
        row.suptitle(f"{found.kind.capitalize()}s with {name} queries", fontsize=11)
        if pictures:
            _thumbnails(row, extreme)
        else:
            _texts(row, extreme)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)


def _histogram(axis: Any, found: QueryCounts) -> None:
    seen, ticker = found.seen, matplotlib_module("ticker")
    if len(seen):
        axis.hist(
            seen.numpy(), bins=_bins(seen), color="tab:blue", edgecolor="white", linewidth=0.4
        )
        mean = float(seen.double().mean())
        axis.axvline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.0f}")
        axis.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1))
        if int(seen.max()) > WIDE * int(seen.min()) > 0:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axis.xaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.5, 0.5)))
    axis.set_xlabel(f"queries per {found.kind} at its last visit, all groups", fontsize=10)
    axis.set_ylabel(f"number of {found.kind}s", fontsize=10)
    title = found.title[0].upper() + found.title[1:]
    axis.set_title(title.replace(" (", "\n("), fontsize=11, loc="left")
    axis.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _thumbnails(row: Any, extreme: Extreme) -> None:
    assert extreme.images is not None
    names = extreme.names or ("",) * len(extreme.counts)
    for place, axis in enumerate(row.subplots(SHOWN // COLUMNS, COLUMNS).flat):
        axis.axis("off")
        if place < len(extreme.counts):
            axis.imshow(*_image(extreme.images[place]))
            name = textwrap.shorten(names[place], 14, placeholder="…") or names[place][:13]
            count = str(extreme.counts[place])
            axis.set_title(f"{name}: {count}" if name else count, fontsize=9)


def _texts(row: Any, extreme: Extreme) -> None:
    axis = row.subplots()
    axis.axis("off")
    for place, (count, text) in enumerate(zip(extreme.counts, extreme.texts, strict=False)):
        if place < TEXTS:
            said = textwrap.shorten(text, CHARACTERS, placeholder=" …")
            height = 1 - (place + 0.5) / TEXTS
            style = {"va": "center", "fontsize": 9, "transform": axis.transAxes}
            axis.text(0.05, height, str(count), ha="right", fontweight="bold", **style)
            axis.text(0.07, height, said.replace("$", r"\$"), **style)


def _bins(seen: Tensor) -> Any:
    """Bin edges, logarithmic if the counts differ by more than a factor of ten."""
    low, high = int(seen.min()), int(seen.max())
    if high > WIDE * low > 0:
        return np.geomspace(low, high, BARS + 1)
    width = -(-(high - low + 1) // BARS)  # whole numbers: else some bars hold more of them
    return np.arange(low, high + width + 1, width) - 0.5


def _image(pixels: Tensor) -> tuple[Any, str | None]:
    """Pixels for matplotlib, and the colour map of grey images."""
    grey = pixels.size(0) == 1
    return (pixels[0] if grey else pixels.permute(1, 2, 0)).numpy(), "gray" if grey else None
