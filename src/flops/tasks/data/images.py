"""Image classification data by name or path: embedded, a folder, or a Hugging Face data set."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD, Splits, digits
from flops.tasks.data.fashion_mnist import fashion_mnist
from flops.tasks.data.folders import read_folder
from flops.tasks.data.hub import NAMED, DatasetSource, is_dataset, read_dataset
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.data.splits import (
    BrokenImageError,
    ImageSplit,
    LazySplit,
    Listing,
    StoredSplit,
    hold_out,
    store,
)

__all__ = [
    "BUNDLED_FORMAT",
    "NAMES",
    "BrokenImageError",
    "ImageData",
    "ImageFormat",
    "ImageSplit",
    "load",
]

# Format of the bundled model and of the embedded data.
BUNDLED_FORMAT = ImageFormat(IMAGE_SIZE, 1, (IMAGE_MEAN,), (IMAGE_STD,))
NAMES = ("digits", "fashion-mnist", *NAMED)
FASHION_CLASSES: tuple[str, ...] = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
FASHION_CLASSES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
MEMORY = 512 * 2**20


@dataclass(frozen=True)
class ImageData:
    """Three splits of a data set and its metadata."""

    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]
    name: str
    skipped: int = 0  # images that cannot be read
    notes: tuple[str, ...] = ()  # remarks about the splits, for reports


def load(
    data: str,
    format: ImageFormat = BUNDLED_FORMAT,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    splits: Mapping[str, str | None] | None = None,
    config: str | None = None,
    validation_share: float = 0.1,
    test_share: float = 0.2,
    strict: bool = False,
    limit: int | None = None,
    memory: int = MEMORY,
) -> ImageData:
    """Load images for classification, as a model reads them.

    The same call returns the same points in the same rows. Images are rotated upright, cropped to
    the centred square, resized bilinearly and normalised. If the decoded images fit into `memory`,
    they are decoded here: unreadable ones are skipped and counted, with one warning. Larger data
    sets are decoded batch by batch; an unreadable image is then detected when it is accessed, and
    replaced by the next readable image of its class, with one warning per split.

    A missing split is held out of the training images, stratified, before anything is decoded;
    `notes` records it. The embedded data sets have fixed splits.

    Args:
        data: One of `NAMES`; `name:path` for a copy on disk of a named one; the path of a folder
            of images (see `folders.read_folder`), of a data set saved with `save_to_disk`, or of
            parquet files; or an id on the Hugging Face hub, `owner/name`.
        format: Image format of the model.
        image_column: Hugging Face only: the image column; None to detect it.
        label_column: Hugging Face only: the label column; None to detect it.
        split_column: Hugging Face only: a column with the values train, validation and test. None
            takes `split` or `dataset` if there are no other splits and it has these values.
        splits: Hugging Face only: its splits for train, validation and test, such as
            {"test": "validation", "validation": None}; None holds one out of train.
        config: Hub only: the configuration.
        validation_share: Share of the training images held out if there is no validation split.
        test_share: The same for a missing test split.
        strict: Raise on an unreadable image.
        limit: Largest number of points per split, stratified.
        memory: Bytes available for decoded images.

    Raises:
        ImportError: A package is missing; the message says which.
        OSError: The data are missing, or the hub cannot be reached.
        ValueError: The data or an option are invalid.
        BrokenImageError: `strict`, and an image cannot be read. Also a ValueError.
    """
    shares = (validation_share, test_share)
    if min(shares) <= 0 or sum(shares) >= 1 or (limit is not None and limit < 1):
        raise ValueError(
            "shares must be positive and add up to less than 1, and limit must be >= 1 or None; "
            f"got {validation_share=}, {test_share=}, {limit=}"
        )
    options = {"image": image_column, "label": label_column, "split": split_column}
    given: dict[str, Any] = {**options, "splits": splits, "config": config}
    given = {key: value for key, value in given.items() if value is not None}
    entry = _resolve(data, format)
    if given and not isinstance(entry, DatasetSource):
        raise ValueError(
            "names of columns, splits and configuration are for Hugging Face data sets; "
            f"{data!r} has none"
        )
    if isinstance(entry, Splits):
        return _embedded(data, entry, format, limit)
    if isinstance(entry, DatasetSource):
        listings, classes = read_dataset(replace(entry, **given))
    else:
        listings, classes = read_folder(entry)
    notes = _complete(listings, validation_share, test_share)
    if limit is not None:
        for name, listing in listings.items():
            if len(listing) > limit:
                listings[name] = listing.take(hold_out(listing.labels, limit)[1])
    return _decoded(data, listings, classes, format, notes, strict, memory)


def _resolve(data: str, format: ImageFormat) -> Splits | DatasetSource | Path:
    """Return the embedded data, or the location of the data."""
    name, colon, place = data.partition(":")
    if name == "digits" and not colon:
        return digits(size=format.size if format == BUNDLED_FORMAT else 8)
    if name == "fashion-mnist":
        return fashion_mnist(Path(place).expanduser() if colon else None)
    if name in NAMED and not colon:
        return NAMED[name]
    path = Path(place if colon and name in NAMED else data).expanduser()
    if (
        place if colon and name in NAMED else data
    ) and path.exists():  # Path("") is the working directory
        entry = NAMED.get(name, DatasetSource("")) if colon else DatasetSource("")
        if is_dataset(path):
            return replace(entry, source=str(path))
        if path.is_dir():
            return path
        raise ValueError(f"{path} is a file, and not a parquet file; give the folder it is in")
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data)
    if not colon and hub_id and not path.parent.is_dir():  # else it is a mistyped local path
        return DatasetSource(data)
    raise FileNotFoundError(
        f"no data {data!r}: give one of {', '.join(NAMES)}, the path of a folder or parquet file "
        "that exists, name:path for a copy of a named data set, or a Hugging Face id, owner/name"
    )


def _embedded(data: str, splits: Splits, format: ImageFormat, limit: int | None) -> ImageData:
    """Return an embedded data set; resized per batch for models other than the bundled one."""
    found: list[ImageSplit] = []
    for split in (splits.train, splits.validation, splits.test):
        if limit is not None and limit < len(split):
            split = split.take(torch.from_numpy(hold_out(split.labels.numpy(), limit)[1]))
        if format == BUNDLED_FORMAT:
            found.append(split)
        else:
            pixels = BUNDLED_FORMAT.restore(split.images)
            found.append(StoredSplit(pixels, split.labels, format))
    digits = data == "digits"
    classes = tuple(map(str, range(10))) if digits else FASHION_CLASSES
    return ImageData(found[0], found[1], found[2], classes, data)


def _complete(listings: dict[str, Listing], *shares: float) -> list[str]:
    """Hold missing splits out of train, in place; return remarks."""
    if empty := [name for name, listing in listings.items() if not len(listing)]:
        raise ValueError(f"no images in the {' and the '.join(empty)} split")
    notes, full = [], len(listings["train"])
    for name, share in zip(("validation", "test"), shares, strict=True):
        if name in listings:
            continue
        size, train = max(1, round(share * full)), listings["train"]
        if size >= len(train):
            raise ValueError(
                f"{full} training images are too few to hold out a {name} split; give one"
            )
        rest, held = hold_out(train.labels, size)
        listings["train"], listings[name] = train.take(rest), train.take(held)
        notes.append(f"{name}: {size} points held out of the {full} training points, stratified")
    return notes


def _decoded(
    data: str,
    listings: dict[str, Listing],
    classes: tuple[str, ...],
    format: ImageFormat,
    notes: list[str],
    strict: bool,
    memory: int,
) -> ImageData:
    ordered = [listings[name] for name in ("train", "validation", "test")]
    total = sum(map(len, ordered))
    broken: list[BrokenImageError] = []
    found: list[ImageSplit] = []
    for name, listing in zip(("train", "validation", "test"), ordered, strict=True):
        if total * format.bytes_per_image > memory:
            found.append(LazySplit(listing, format, strict))
            continue
        split, unreadable = store(listing, format, strict)
        broken += unreadable
        if not len(split):
            raise ValueError(f"no {name} image of {data} can be read; the first: {unreadable[0]}")
        found.append(split)
    if broken:
        warnings.warn(
            f"skipped {len(broken)} of {total} images of {data} that cannot be read, the first: "
            f"{broken[0]}; strict makes this an error",
            stacklevel=3,
        )
    if absent := len(classes) - len(np.unique(found[0].labels.numpy())):
        notes.append(f"{absent} of {len(classes)} classes have no training points")
    return ImageData(
        found[0], found[1], found[2], classes, data, skipped=len(broken), notes=tuple(notes)
    )
