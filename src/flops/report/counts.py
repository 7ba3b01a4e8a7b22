"""counts.safetensors: queries of each training point at its last visit, and the extremes.

The file holds the counts over all groups, the classes, and what the points with most and fewest
queries look like: thumbnails of images, or the beginning of texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flops.storage.files import replacing
from flops.storage.plain import parse_json

SHOWN = 12  # points per extreme
LONGEST = 300  # characters of a text


@dataclass(frozen=True)
class Extreme:
    """The points with most, or with fewest, queries.

    Attributes:
        counts: Queries of each.
        names: Names of their classes; empty without classes.
        images: Thumbnails, uint8, (n, channels, side, side); None for texts.
        texts: Beginnings of the texts; empty for images, and if they were not recorded.
    """

    counts: tuple[int, ...]
    names: tuple[str, ...]
    images: Tensor | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueryCounts:
    """Where the queries went.

    Attributes:
        seen: Queries of each visited point, (N,).
        classes: Names of the classes.
        most: Points with most queries, in descending order.
        least: Points with fewest queries, in ascending order.
    """

    seen: Tensor
    classes: tuple[str, ...]
    most: Extreme
    least: Extreme

    @property
    def kind(self) -> str:
        """What a point is, for people."""
        return "text" if self.most.images is None else "image"

    @property
    def title(self) -> str:
        """A sentence about the range of the counts."""
        if not len(self.seen):
            return f"no {self.kind} was visited"
        low, high = int(self.seen.min()), int(self.seen.max())
        if high == low:
            return f"{low} queries for every {self.kind}"
        return f"from {low} to {high} queries per {self.kind} ({high / max(1, low):.3g} times)"


def write_counts(
    path: Path,
    counts: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    pixels: Callable[[Tensor], Tensor | None],
    excerpts: Callable[[Tensor], Sequence[str] | None] = lambda rows: None,
) -> None:
    """Write the counts, and thumbnails or texts, atomically.

    Args:
        path: File to write.
        counts: Queries of each point, shape (N,); negative for a point not visited.
        labels: Classes of the points, shape (N,).
        classes: Names of the classes.
        pixels: Maps rows to images (n, channels, side, side), in [0, 1]; to None for texts.
        excerpts: Maps rows to texts; to None for images.
    """
    seen = torch.nonzero(counts >= 0).flatten()
    order = seen[torch.argsort(counts[seen], descending=True, stable=True)]
    most, least = order[:SHOWN], order.flip(0)[: min(SHOWN, max(0, len(order) - SHOWN))]
    tensors = {"counts": counts.clone(), "labels": labels.clone(), "most": most, "least": least}
    kept = {"classes": json.dumps(list(classes))}
    for name in ("most", "least"):
        shown = pixels(tensors[name]) if len(tensors[name]) else torch.zeros(0, 1, 1, 1)
        if shown is not None:
            tensors[f"{name}_images"] = (255 * shown).round().to(torch.uint8)
        texts = excerpts(tensors[name])
        if texts is not None:
            kept[f"{name}_texts"] = json.dumps([text[:LONGEST] for text in texts])
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as scratch:
        save_file(whole, scratch, metadata=kept)


def read_counts(path: Path) -> QueryCounts:
    """Read a file of `write_counts`, also of older versions, which kept no texts.

    Raises:
        OSError: It cannot be read.
        ValueError: It was not written by `write_counts`.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            kept = {name: parse_json(text) for name, text in file.metadata().items()}
        classes = tuple(map(str, kept["classes"]))
        images = "most_images" in found and "least_images" in found
        extremes = [_extreme(found, kept, name, classes, images) for name in ("most", "least")]
        seen = found["counts"][found["counts"] >= 0]
    except (SafetensorError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a complete file of counts: {error}") from error
    return QueryCounts(seen, classes, *extremes)


def _extreme(
    found: dict[str, Tensor],
    kept: dict[str, Any],
    name: str,
    classes: tuple[str, ...],
    images: bool,
) -> Extreme:
    rows = found[name]
    return Extreme(
        tuple(found["counts"][rows].tolist()),
        tuple(classes[i] for i in found["labels"][rows].tolist()) if classes else (),
        found[f"{name}_images"] if images else None,
        tuple(map(str, kept.get(f"{name}_texts", ()))),
    )
