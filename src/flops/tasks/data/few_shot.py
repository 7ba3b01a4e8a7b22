"""Few-shot data for prompt tuning: embedded, or sampled from any data set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.blackbox.tuning import SplitIndices
from flops.errors import FlopsError
from flops.tasks.data.fashion import fashion_shots
from flops.tasks.data.images import load
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.data.splits import ImageSplit

BUNDLED = "fashion-shots"


@dataclass(frozen=True)
class FewShots:
    """Pixels and labels of all points, and their splits.

    Attributes:
        pixels: uint8, (N, H, W) or (N, H, W, channels).
        labels: Classes, (N,).
        points: Indices of training, validation and test points.
        classes: Names of the classes.
    """

    pixels: Tensor
    labels: Tensor
    points: SplitIndices
    classes: tuple[str, ...]


def few_shots(
    data: str = BUNDLED,
    shots: int = 16,
    channels: int = 3,
    size: int = 224,
    limit: int | None = None,
    seed: int = 0,
) -> FewShots:
    """A number of training shots per class, as many for validation, and the whole test set.

    Args:
        data: "fashion-shots", which ships with the package, with a distribution shift; or anything
            that `flops finetune --data` accepts.
        shots: Training images per class.
        channels: Channels of the model's images.
        size: Side of the model's images.
        limit: Largest number of test images; None for all.
        seed: Seeds the selection of shots.

    Raises:
        FlopsError: If there are not enough images.
    """
    if data == BUNDLED:
        embedded = fashion_shots()
        count = len(embedded.classes)
        most = len(embedded.train) // count
        if not 1 <= shots <= most:
            raise FlopsError(f"{data} has at most {most} shots per class, not {shots}")
        splits = [embedded.train, embedded.validation, embedded.test]
        keep = [shots * count, len(splits[1]), limit or len(splits[2])]
        parts = [(s.pixels[:n], s.labels[:n]) for s, n in zip(splits, keep, strict=True)]
        return _joined(parts, embedded.classes)
    try:
        found = load(data, ImageFormat(size, channels, (0.0,) * channels, (1.0,) * channels))
    except (OSError, ValueError, ImportError) as error:
        raise FlopsError(str(error)) from error
    classes = len(found.classes)
    train, validation = (
        _some(split, shots, classes, seed) for split in (found.train, found.validation)
    )
    rows = torch.arange(len(found.test))[:limit]
    chosen = [(found.train, train), (found.validation, validation), (found.test, rows)]
    return _joined([_pixels(split, at) for split, at in chosen], found.classes)


def _some(split: ImageSplit, shots: int, classes: int, seed: int) -> Tensor:
    """Rows of the first shots of each class in a random order; classes alternate."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    labels = split.labels[order]
    rows = [order[labels == c][:shots] for c in range(classes)]
    if not all(len(found) for found in rows):
        empty = [c for c, found in enumerate(rows) if not len(found)]
        raise FlopsError(f"class {empty[0]} has no image among the {len(split)} of a split")
    most = max(len(found) for found in rows)
    turns = [found[i] for i in range(most) for found in rows if i < len(found)]
    return torch.stack(turns)


def _pixels(split: ImageSplit, rows: Tensor) -> tuple[Tensor, Tensor]:
    parts = []
    for some in rows.split(256):
        images, _ = split.batch(some)
        parts.append((images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(parts), split.labels[rows]


def _joined(parts: list[tuple[Tensor, Tensor]], classes: tuple[str, ...]) -> FewShots:
    pixels = torch.cat([p for p, _ in parts])
    labels = torch.cat([y for _, y in parts])
    sizes = [len(y) for _, y in parts]
    train, validation, test = torch.arange(len(labels)).split(sizes)
    return FewShots(pixels, labels, SplitIndices(train, validation, test), classes)
