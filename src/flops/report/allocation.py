"""Plot of the query allocation: a histogram, and thumbnails of both extremes.

The data of the plot are in counts.safetensors: the queries of each training point at its last
visit, over all groups, and thumbnails of the images with most and fewest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flops.report.plots import matplotlib_figures
from flops.storage.files import replacing
from flops.storage.plain import parse_json

SHOWN = 12  # thumbnails per extreme
WIDE = 10  # ratio of counts above which the axis is logarithmic


def write_counts(
    path: Path,
    counts: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    pixels: Callable[[Tensor], Tensor | None],
) -> None:
    """Write the counts and, for images, thumbnails, atomically.

    Args:
        path: File to write.
        counts: Queries of each point, shape (N,); negative for a point not visited.
        labels: Classes of the points, shape (N,).
        classes: Names of the classes.
        pixels: Maps rows to images (n, channels, side, side), in [0, 1]; to None for texts.
    """
    seen = torch.nonzero(counts >= 0).flatten()
    order = seen[torch.argsort(counts[seen], descending=True, stable=True)]
    most, least = order[:SHOWN], order.flip(0)[: min(SHOWN, max(0, len(order) - SHOWN))]
    tensors = {"counts": counts.clone(), "labels": labels.clone(), "most": most, "least": least}
    for name in ("most", "least"):
        shown = pixels(tensors[name]) if len(tensors[name]) else torch.zeros(0, 1, 1, 1)
        if shown is not None:
            tensors[f"{name}_images"] = (255 * shown).round().to(torch.uint8)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as scratch:
        save_file(whole, scratch, metadata={"classes": json.dumps(list(classes))})


def plot_allocation(counts: Path, path: Path) -> None:
    """Plot a histogram of queries per image, and the images with most and fewest.

    Args:
        counts: A file written by `write_counts`.
        path: File to write.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be read.
        ValueError: It was not written by `write_counts`.
    """
    try:
        found, classes = _read_counts(counts)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{counts} is not a complete file of counts: {error}") from error
    images = "most_images" in found and "least_images" in found
    kind, ratios = ("image", [2, 1, 1]) if images else ("text", [2])
    size = (SHOWN, 5.2 * sum(ratios) / 4)
    figure = matplotlib_figures().Figure(figsize=size, layout="constrained")
    top, *rows = figure.subfigures(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
    seen = found["counts"][found["counts"] >= 0]
    axis = top.subplots()
    if len(seen):
        axis.hist(seen.numpy(), bins=_bins(seen))
        if int(seen.max()) > WIDE * int(seen.min()) > 0:
            axis.set_xscale("log")
    axis.set_xlabel(f"queries per {kind} at its last visit, over all groups")
    axis.set_ylabel(f"{kind}s")
    axis.set_title(_title(seen, kind))
    for name, row in zip(("most", "least"), rows, strict=False):
        row.suptitle(f"{name} queries", fontsize=10, x=0.01, ha="left")
        for place, axis in enumerate(row.subplots(1, SHOWN)):
            axis.axis("off")
            if place < len(found[name]):
                point = int(found[name][place])
                axis.imshow(*_image(found[f"{name}_images"][place]))
                label = str(classes[int(found["labels"][point])])[:14]
                axis.set_title(f"{label}: {int(found['counts'][point])}", fontsize=8)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=110)


def _read_counts(path: Path) -> tuple[dict[str, Tensor], Any]:
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return found, parse_json(file.metadata()["classes"])


def _bins(seen: Tensor) -> Any:
    """Bin edges, logarithmic if the counts differ by more than a factor of ten."""
    low, high = int(seen.min()), int(seen.max())
    if high > WIDE * low > 0:
        return np.geomspace(low, high, 40)
    return np.linspace(low - 0.5, high + 0.5, min(60, high - low + 1) + 1)


def _title(seen: Tensor, kind: str) -> str:
    if not len(seen):
        return f"no {kind} was visited"
    if int(seen.max()) == int(seen.min()):
        return f"{int(seen[0])} queries for every {kind}"
    ratio = float(seen.max()) / max(1.0, float(seen.min()))
    return f"from {int(seen.min())} to {int(seen.max())} queries per {kind} ({ratio:.1f} times)"


def _image(pixels: Tensor) -> tuple[Any, str | None]:
    """Pixels for matplotlib, and the colour map of grey images."""
    grey = pixels.size(0) == 1
    return (pixels[0] if grey else pixels.permute(1, 2, 0)).numpy(), "gray" if grey else None
