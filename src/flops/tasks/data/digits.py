"""Scikit-learn's handwritten digits, prepared for the bundled vision transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.optional import require
from flops.tasks.data.splits import hold_out

IMAGE_SIZE = 32
# Pixels in [0, 1] become (pixel - mean) / std. The pretraining script writes the same two numbers
# into the model's preprocessor_config.json, so that other tools normalise images in the same way.
IMAGE_MEAN, IMAGE_STD = 0.5, 0.5


@dataclass(frozen=True)
class Split:
    """Images, normalised for the model, and their classes."""

    images: Tensor  # (N, 1, size, size), float32
    labels: Tensor  # (N,), int64

    def __len__(self) -> int:
        """Number of points."""
        return len(self.labels)

    def take(self, rows: Tensor | slice) -> Split:
        """Return a split of some of the points."""
        return Split(self.images[rows], self.labels[rows])

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of these rows."""
        return self.images[rows], self.labels[rows]


@dataclass(frozen=True)
class Splits:
    """Training, validation and test split."""

    train: Split
    validation: Split
    test: Split


def digits(*, size: int = IMAGE_SIZE) -> Splits:
    """Return scikit-learn's handwritten digits, resized and normalised for the bundled model.

    The 1,797 images of 8x8 are upsampled bilinearly. The splits have 1,197 / 300 / 300 points, are
    stratified (each class within one point of its share) and never change.

    Args:
        size: Side of the returned images.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: `size` is less than 8.
    """
    if size < 8:
        raise ValueError(f"size must be at least 8, the side of the original images, got {size}")
    data = require("sklearn.datasets").load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16  # (N, 1, 8, 8), in [0, 1]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    rest, test = hold_out_split(Split(normalise(images), torch.from_numpy(data.target).long()), 300)
    return Splits(*hold_out_split(rest, 300), test)


def normalise(pixels: Tensor) -> Tensor:
    """Normalise pixels in [0, 1], in place."""
    return pixels.sub_(IMAGE_MEAN).div_(IMAGE_STD)


def hold_out_split(split: Split, size: int) -> tuple[Split, Split]:
    """Return (the rest, `size` points held out), stratified, both in a fixed random order."""
    rest, held = hold_out(split.labels.numpy(), size)
    return split.take(torch.from_numpy(rest)), split.take(torch.from_numpy(held))
