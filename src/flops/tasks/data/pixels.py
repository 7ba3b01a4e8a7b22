"""Preprocessing: rotate upright, crop to a square, resize, normalise."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from flops.optional import require

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's errors for a missing, truncated or invalid file have no common base class.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class ImageFormat:
    """Image format of a model: side, channels and normalisation.

    Pixels in [0, 1] become (pixel - mean) / std, channel by channel.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.size < 1 or self.channels not in _MODES:
            found = f"size={self.size}, channels={self.channels}"
            raise ValueError(f"images need size >= 1 and 1 (grey) or 3 (RGB) channels, got {found}")
        sizes = (len(self.mean), len(self.std))
        numbers = all(map(math.isfinite, (*self.mean, *self.std)))
        if sizes != (self.channels,) * 2 or not numbers or min(self.std) <= 0:
            found = f"mean={self.mean}, std={self.std}"
            raise ValueError(
                f"need a mean and a positive std for each of {self.channels} channels, got {found}"
            )

    @property
    def bytes_per_image(self) -> int:
        """Memory of one decoded image, before it is normalised."""
        return self.channels * self.size**2

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return images as the model reads them: resized if needed, normalised, in float32.

        Args:
            pixels: (n, 1 or channels, side, side), uint8 or floats in [0, 1].

        Returns:
            A new tensor, (n, channels, size, size).
        """
        pixels = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels.float()
        side = (self.size, self.size)
        if pixels.shape[2:] != side:
            shrinks = pixels.shape[2] > self.size  # antialiasing only matters here
            pixels = F.interpolate(pixels, size=side, mode="bilinear", antialias=shrinks)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (pixels - mean[:, None, None]).div_(std[:, None, None])

    def restore(self, images: Tensor) -> Tensor:
        """Return pixels in [0, 1] from normalised images, for display."""
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (images.cpu() * std[:, None, None] + mean[:, None, None]).clamp(0, 1)


def decode(image: Image, format: ImageFormat) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image, (channels, size, size).

    It is rotated upright by its EXIF orientation, converted to grey or RGB, cropped to the centred
    square and resized bilinearly, with antialiasing. That equals resizing the short side and
    cropping the centre, without the pixels that would be discarded.
    """
    pil, operations = require("PIL.Image"), require("PIL.ImageOps")
    image = operations.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255
        image = pil.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))
    if image.mode == "F":  # convert() would truncate values in [0, 1] to black
        image = pil.fromarray(_bytes(np.asarray(image)))
    if image.mode == "P" and "transparency" in image.info:  # a direct conversion warns
        image = image.convert("RGBA")
    image = image.convert(_MODES[format.channels])
    side = min(image.size)
    left, top = ((length - side) / 2 for length in image.size)
    image = image.resize(
        (format.size, format.size),
        pil.Resampling.BILINEAR,
        box=(left, top, left + side, top + side),
    )
    pixels = np.asarray(image, dtype=np.uint8)  # (size, size[, 3])
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _bytes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Floats in [0, 1], or else in [0, 255], as bytes."""
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= 255:
        raise ValueError(
            f"an image of floats needs values in [0, 1] or [0, 255], not {low}..{high}"
        )
    return np.rint(values * (255 if high <= 1 else 1)).astype(np.uint8)
