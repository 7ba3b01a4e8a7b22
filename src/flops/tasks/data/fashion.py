"""A few images of Fashion-MNIST that ship with the package: 16 shots a class to tune prompts on.

The original pixels are stored (`scripts/make_shots.py` chose them); the shift that makes a task of
them is applied here, at load time.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What the captions call the classes, in the order of Fashion-MNIST's labels.
_NAMES = "t-shirt, trousers, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
CLASSES = tuple(_NAMES.split(", "))

# The shift, a haze: a share of every pixel gives way to the haze's own grey, in per cent and bytes.
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
    """Train to tune prompts, validation to choose settings, test to measure once."""

    train: PixelSplit  # 16 a class
    validation: PixelSplit  # 16 a class
    test: PixelSplit  # 100 a class
    classes: tuple[str, ...]


def fashion_shots(shift: bool = True) -> Shots:
    """Return the embedded images: 160 to train on, 160 to validate on, 1,000 to test on.

    Train and validation images come from the training set of Fashion-MNIST, and the bundled CLIP
    saw none of them; the test images come from its test set. Classes take turns, so the first
    10 n points hold n of each.

    Args:
        shift: Apply `shifted` to all pixels, which makes the task that prompts are tuned for.
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

    Black becomes a middling grey and contrast falls by nearly half, but little detail is lost. The
    bundled CLIP has seen only garments on black, so with a manual prompt it takes half of the
    images for bags; prompts can undo that, since the fault is the same for all images. Integer
    arithmetic, hence the same bytes everywhere.
    """
    hazy = pixels.int() * (100 - HAZE) + HAZE * GREY
    return ((hazy + 50) // 100).to(torch.uint8)


def _split(pixels: Tensor, shift: bool) -> PixelSplit:
    labels = torch.arange(len(pixels)) % len(CLASSES)  # the classes take turns
    return PixelSplit(shifted(pixels) if shift else pixels, labels)
