"""Fashion-MNIST images that ship with the package: 16 shots per class for prompt tuning.

The original pixels are stored (`scripts/make_shots.py` selected them); the distribution shift is
applied when they are loaded.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Class names in captions, in the order of Fashion-MNIST's labels.
_NAMES = "t-shirt, trousers, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
CLASSES = tuple(_NAMES.split(", "))

# The shift is haze: every pixel is blended with a grey. Share in per cent, grey as a byte.
HAZE, GREY = 45, 200


@dataclass(frozen=True)
class PixelSplit:
    """Images as bytes, and their classes."""

    pixels: Tensor  # (N, 28, 28), uint8
    labels: Tensor  # (N,), int64

    def __len__(self) -> int:
        """Number of points."""
        return len(self.labels)


@dataclass(frozen=True)
class Shots:
    """Training, validation and test split."""

    train: PixelSplit  # 16 per class
    validation: PixelSplit  # 16 per class
    test: PixelSplit  # 100 per class
    classes: tuple[str, ...]


def fashion_shots(shift: bool = True) -> Shots:
    """Return the embedded images: 160 to train on, 160 to validate on, 1,000 to test on.

    Training and validation images are from the training set of Fashion-MNIST, and were not used to
    train the bundled CLIP; test images are from its test set. Classes alternate, so the first 10 n
    points hold n of each.

    Args:
        shift: Apply `shifted` to all pixels.
    """
    asset = importlib.resources.files("flops.tasks") / "assets" / "fashion" / "shots.npz"
    with asset.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        train, validation, test = (
            _split(torch.from_numpy(arrays[name]), shift)
            for name in ("train", "validation", "test")
        )
    return Shots(train, validation, test, CLASSES)


def shifted(pixels: Tensor) -> Tensor:
    """Return the images behind haze, uint8.

        pixel' = round((1 - h) pixel + h grey),    h = 0.45, grey = 200

    Black becomes a medium grey and contrast falls by nearly half, but little detail is lost. The
    bundled CLIP was trained on garments on black, so with a manual prompt it classifies half of the
    images as bags; prompts can correct that, since the shift is the same for all images. Integer
    arithmetic gives the same bytes on every machine.
    """
    hazy = pixels.int() * (100 - HAZE) + HAZE * GREY
    return ((hazy + 50) // 100).to(torch.uint8)


def _split(pixels: Tensor, shift: bool) -> PixelSplit:
    labels = torch.arange(len(pixels)) % len(CLASSES)  # classes alternate
    return PixelSplit(shifted(pixels) if shift else pixels, labels)
