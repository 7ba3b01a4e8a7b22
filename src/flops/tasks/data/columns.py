"""Detects the image and label columns of a data set, and encodes the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flops.optional import require
from flops.tasks.data.splits import Rows

_LABEL_NAMES = ("label", "labels", "fine_label", "class", "category", "target")


@dataclass(frozen=True)
class Columns:
    """Names of the image and label columns."""

    image: str
    label: str
    decodes: bool  # the data set decodes images itself


def find_columns(
    features: Mapping[str, Any], image: str | None = None, label: str | None = None
) -> Columns:
    """Find the columns of images and labels.

    Images are the one column of images, of files (bytes and path) or of bytes. Labels are the one
    column that declares classes, else the first that is called label, labels, fine_label, class,
    category or target.

    Args:
        features: Columns and their types, as `datasets` describes them.
        image: Name of the image column; None to detect it.
        label: Name of the label column; None to detect it.

    Raises:
        ValueError: A column is missing, has no images, or is ambiguous.
    """
    datasets = require("datasets", "data")
    columns = ", ".join(features)
    for what, name in (("image", image), ("label", label)):
        if name is not None and name not in features:
            raise ValueError(f"no {what} column {name!r}; the columns are {columns}")
    kinds = {name: _image_kind(feature, datasets.Image) for name, feature in features.items()}
    if image is None:
        best = min((kind for kind in kinds.values() if kind is not None), default=None)
        image = _only(
            [n for n in features if best is not None and kinds[n] == best], "image", columns
        )
    elif kinds[image] is None:
        raise ValueError(
            f"the column {image!r} holds {features[image]}; images are datasets.Image, bytes, or "
            f"bytes and path. The columns are {columns}"
        )
    if label is None:
        found = [n for n, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        named = [name for name in _LABEL_NAMES if name in (found or features)]
        label = _only(found if len(found) == 1 else named[:1], "label", columns)
    return Columns(image, label, decodes=kinds[image] == 0)


def label_codes(
    values: Mapping[str, npt.NDArray[Any]], feature: Any
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """Return each split's classes as 0, 1, ... and the names of the classes.

    Args:
        values: Labels by split, with one for "train".
        feature: Type of the column; without declared names, the sorted values of train are used.

    Raises:
        ValueError: A label is missing, out of range, not in train, or neither text nor a
            non-negative whole number.
    """
    if isinstance(feature, require("datasets", "data").ClassLabel):
        names = tuple(feature.names)
        allowed: dict[Any, int] = {code: code for code in range(len(names))}
    else:
        present = {value for value in values["train"].tolist() if value is not None}
        whole = all(type(value) is int and value >= 0 for value in present)
        if not present or not (whole or all(type(value) is str for value in present)):
            some = ", ".join(map(repr, list(present)[:3])) or "nothing"
            raise ValueError(
                f"labels are text or whole numbers from 0, got {some}; see label_column"
            )
        ordered = sorted(present)
        names, allowed = tuple(map(str, ordered)), {value: i for i, value in enumerate(ordered)}
    codes = {}
    for split, column in values.items():
        for row, value in enumerate(column.tolist()):
            if value not in allowed:
                kept = list(allowed)
                span = f"{kept[0]!r} to {kept[-1]!r} ({len(kept)} classes)"
                raise ValueError(
                    f"point {row} of the {split} split has the label {value!r}; allowed are {span}."
                    " A split without labels cannot be used: choose another one with `splits`,"
                    " such as test=validation"
                )
        codes[split] = np.array([allowed[value] for value in column.tolist()], np.int64)
    return codes, names


def _image_kind(feature: Any, image: type) -> int | None:
    """0 for a column of images, 1 for files or bytes, None for anything else."""
    if isinstance(feature, image):
        return 0
    fields = set(feature) if isinstance(feature, dict) else set()
    return 1 if "bytes" in fields or getattr(feature, "dtype", "").endswith("binary") else None


def _only(names: list[str], what: str, columns: str) -> str:
    if len(names) != 1:
        found = f"{len(names)} candidates ({', '.join(names)})" if names else "none fits"
        raise ValueError(
            f"cannot detect the {what} column: {found}; choose it with {what}_column. The columns "
            f"are {columns}"
        )
    return names[0]
