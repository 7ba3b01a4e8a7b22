"""Splits of image data: decoded in memory, or decoded at every access."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.optional import require
from flops.tasks.data.pixels import UNREADABLE, ImageFormat, decode

if TYPE_CHECKING:
    from PIL.Image import Image

Rows = npt.NDArray[np.int64]

# Names of the three splits in folders, files and columns.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class ImageSplit(Protocol):
    """Points of a data set, fixed in number and order."""

    @property
    def labels(self) -> Tensor:
        """Classes of all points, (N,), int64, in memory."""

    def __len__(self) -> int:
        """Number of points."""

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (n, channels, size, size), normalised, and labels (n,) of these rows."""


class Pictures(Protocol):
    """A source of image files."""

    def open(self, row: int) -> Image:
        """Open an image, to be closed by the caller."""

    def name(self, row: int) -> str:
        """Name of an image, for messages."""


@dataclass(frozen=True)
class Listing:
    """Undecoded images and their classes."""

    pictures: Pictures
    rows: Rows  # (N,), indices into pictures
    labels: Rows  # (N,), classes

    def __len__(self) -> int:
        """Number of points."""
        return len(self.rows)

    def take(self, points: Rows) -> Listing:
        """Return some of the points."""
        return Listing(self.pictures, self.rows[points], self.labels[points])

    def decode(self, point: int, format: ImageFormat) -> npt.NDArray[np.uint8]:
        """Return one point's pixels, (channels, size, size).

        Raises:
            BrokenImageError: It cannot be read; the message names the file.
        """
        row, bomb = int(self.rows[point]), require("PIL.Image").DecompressionBombError
        try:
            with self.pictures.open(row) as image:
                return decode(image, format)
        except (*UNREADABLE, bomb) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BrokenImageError(f"cannot read {self.pictures.name(row)} ({reason})") from error


class BrokenImageError(FlopsError, ValueError):
    """An image is missing, truncated or invalid."""


@dataclass(frozen=True)
class StoredSplit:
    """Decoded images in memory, resized and normalised at access."""

    pixels: Tensor  # (N, 1 or channels, side, side), uint8 or floats in [0, 1]
    labels: Tensor  # (N,), int64
    format: ImageFormat

    def __len__(self) -> int:
        """Number of points."""
        return len(self.labels)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of these rows."""
        return self.format.prepare(self.pixels[rows]), self.labels[rows]


@dataclass(frozen=True)
class LazySplit:
    """Images that are decoded at every access.

    An unreadable image is detected only then. It is replaced by the next readable image of its
    class, always the same one, so that the number of points and their labels do not change.
    """

    listing: Listing
    format: ImageFormat
    strict: bool = False
    stand_ins: dict[int, int] = field(default_factory=dict)  # unreadable point -> its replacement

    def __len__(self) -> int:
        """Number of points."""
        return len(self.listing)

    @property
    def labels(self) -> Tensor:
        """Classes of all points."""
        return torch.from_numpy(self.listing.labels)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of these rows.

        Raises:
            BrokenImageError: An image cannot be read, and the split is strict or has no readable
                image of the same class.
        """
        labels = self.labels[rows]  # first: raises for rows that do not exist
        points = [row % len(self) for row in rows.tolist()]
        pixels = np.empty((len(points), self.format.channels, *[self.format.size] * 2), np.uint8)
        for place, point in enumerate(points):
            pixels[place] = self._pixels(point)
        return self.format.prepare(torch.from_numpy(pixels)), labels

    def _pixels(self, point: int) -> npt.NDArray[np.uint8]:
        try:
            return self.listing.decode(self.stand_ins.get(point, point), self.format)
        except BrokenImageError as error:
            if self.strict:
                raise
            broken = error
        same = np.flatnonzero(self.listing.labels == self.listing.labels[point])
        for other in np.roll(same, -1 - int(np.searchsorted(same, point)))[:-1].tolist():
            try:
                pixels = self.listing.decode(other, self.format)
            except BrokenImageError:
                continue
            if not self.stand_ins:
                warnings.warn(
                    f"{broken}: it is replaced by another image of its class. Further ones are "
                    "replaced silently; strict makes them an error",
                    stacklevel=3,
                )
            self.stand_ins[point] = other
            return pixels
        raise BrokenImageError(f"{broken}, nor any other image of its class in this split")


def hold_out(labels: Rows, size: int) -> tuple[Rows, Rows]:
    """Return (the rest, `size` rows held out), stratified, both in a fixed random order.

    Systematic sampling: shuffle, sort by class, take evenly spaced points. So the size is exact
    and each class is within one point of its share.
    """
    # numpy guarantees the stream of this legacy generator, so splits do not change with its version
    order = np.random.RandomState(0).permutation(len(labels))
    by_class = labels[order].argsort(kind="stable")
    held = np.zeros(len(labels), dtype=bool)
    held[by_class[(2 * np.arange(size) + 1) * len(labels) // max(2 * size, 1)]] = True
    return order[~held], order[held]


def store(
    listing: Listing, format: ImageFormat, strict: bool = False
) -> tuple[StoredSplit, list[BrokenImageError]]:
    """Decode all images into memory; unreadable ones are skipped and returned.

    Raises:
        BrokenImageError: `strict`, and an image cannot be read.
    """
    pixels = np.empty((len(listing), format.channels, format.size, format.size), np.uint8)
    good: list[int] = []
    broken: list[BrokenImageError] = []
    for point in range(len(listing)):
        try:
            pixels[len(good)] = listing.decode(point, format)
            good.append(point)
        except BrokenImageError as error:
            if strict:
                raise
            broken.append(error)
    labels = torch.from_numpy(listing.labels[good])
    return StoredSplit(torch.from_numpy(pixels[: len(good)]), labels, format), broken
