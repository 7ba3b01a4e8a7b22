"""Hugging Face data sets: from the hub by id, saved to disk, or as parquet files."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flops.optional import require
from flops.tasks.data.columns import find_columns, label_codes
from flops.tasks.data.folders import open_image
from flops.tasks.data.splits import SPLIT_WORDS, Listing, Rows

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class DatasetSource:
    """Location of a data set, and names of its columns and splits; None to detect them."""

    source: str  # hub id or local path
    image: str | None = None
    label: str | None = None
    split: str | None = None  # column that holds the split of each row
    splits: Mapping[str, str | None] | None = None  # ours -> theirs; None is held out of train
    config: str | None = None  # one of several configurations on the hub


# The paper's seven. Ids on the hub may change: use a mirror with the same columns by its id, or a
# copy on disk as "cifar10:/path/to/it". ImageNet's test split has no labels, and Food-101 names its
# test split validation; both are tested on "validation", as is customary.
_TESTED_ON_VALIDATION = {"train": "train", "validation": None, "test": "validation"}
NAMED = {
    "imagenet": DatasetSource("ILSVRC/imagenet-1k", "image", "label", splits=_TESTED_ON_VALIDATION),
    "caltech101": DatasetSource("dpdl-benchmark/caltech101", "image", "label"),
    "food101": DatasetSource("ethz/food101", "image", "label", splits=_TESTED_ON_VALIDATION),
    "flowers102": DatasetSource("dpdl-benchmark/oxford_flowers102", "image", "label"),
    "cifar10": DatasetSource("uoft-cs/cifar10", "img", "label"),
    "cifar100": DatasetSource("uoft-cs/cifar100", "img", "fine_label"),
    "eurosat": DatasetSource("blanchon/EuroSAT_RGB", "image", "label"),
}
LOCAL = f"a folder of images; for a named data set as name:path, from {', '.join(NAMED)}"


@dataclass(frozen=True)
class Table:
    """Image files inside a column of a data set."""

    dataset: Any
    column: str
    where: str

    def open(self, row: int) -> Image:
        """Open the image of one row."""
        value = self.dataset[row][self.column]
        content, path = value, None
        if isinstance(value, dict):
            content, path = value.get("bytes"), value.get("path")
        if content is not None:
            image: Image = require("PIL.Image").open(io.BytesIO(content))
            return image
        if path is None:
            raise ValueError("this row is empty")
        return open_image(Path(path))

    def name(self, row: int) -> str:
        """Return the data set, the row, and the file name if stored."""
        value = self.dataset[row][self.column]
        path = value.get("path") if isinstance(value, dict) else None
        return f"row {row} of {self.where}" + (f", {path}" if path else "")


def is_dataset(path: Path) -> bool:
    """Whether a local path holds a Hugging Face dataset rather than a folder of images."""
    if path.is_file():
        return path.suffix == ".parquet"
    marks = ("dataset_dict.json", "state.json")
    return any((path / mark).is_file() for mark in marks) or bool(next(_parquet(path), None))


def read_dataset(entry: DatasetSource) -> tuple[dict[str, Listing], tuple[str, ...]]:
    """List the images of a data set, split by split in the order of its rows.

    The split of a parquet file is given by its name or that of its folder; default is train.

    Returns:
        The splits, not decoded, and the classes: those that the label column declares, else the
        sorted values in train.

    Raises:
        ImportError: `datasets` is not installed.
        OSError: The data set cannot be loaded.
        ValueError: A column or split is missing or ambiguous, or a label is out of range.
    """
    tables = open_tables(entry)
    first = next(iter(tables.values()))
    columns = find_columns(first.features, entry.image, entry.label)
    rows: dict[str, tuple[str, Rows]] = {}  # ours -> theirs and the rows
    column = entry.split
    if column is not None and entry.splits is not None:
        raise ValueError("give split_column or splits, not both: a column has no splits to name")
    if column is None and entry.splits is None and len(tables) == 1:
        column = next((c for c in ("split", "dataset") if _holds_splits(first, c)), None)
    if column is not None:
        if len(tables) > 1 or not _holds_splits(first, column):
            allowed = f"one table whose values are {', '.join(SPLIT_WORDS)}"
            raise ValueError(f"cannot split by the column {column!r}: that needs {allowed}")
        (theirs,) = tables
        said = np.array([SPLIT_WORDS[v.lower()] for v in first[column][:]])
        rows = {ours: (theirs, np.flatnonzero(said == ours)) for ours in np.unique(said).tolist()}
    else:
        named = name_splits(tuple(tables), entry.splits or {})
        rows = {o: (theirs, np.arange(len(tables[theirs]))) for o, theirs in named.items()}
    if "train" not in rows:
        raise ValueError(f"no row of {entry.source} is marked train in its column {column!r}")
    values = {ours: np.array(tables[t][columns.label][:])[r] for ours, (t, r) in rows.items()}
    codes, classes = label_codes(values, first.features[columns.label])
    listings = {}
    for ours, (theirs, chosen) in rows.items():
        dataset = tables[theirs].select_columns([columns.image])
        if columns.decodes:  # decoded here, so that errors name the image
            plain = require("datasets", "data").Image(decode=False)
            dataset = dataset.cast_column(columns.image, plain)
        table = Table(dataset, columns.image, f"{entry.source}, split {theirs}")
        listings[ours] = Listing(table, chosen, codes[ours])
    return listings, classes


def open_tables(entry: DatasetSource, local: str = LOCAL) -> dict[str, Any]:
    """Return the splits of the data set by its own names.

    Args:
        entry: The data set.
        local: What to give instead of an id that the hub does not have, for the message.

    Raises:
        ImportError: `datasets` is not installed.
        OSError: The hub has no such data set, or cannot be reached.
        ValueError: A local one cannot be read.
    """
    datasets, path = require("datasets", "data"), Path(entry.source).expanduser()
    bars = datasets.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if not path.exists():
            found = datasets.load_dataset(entry.source, entry.config, trust_remote_code=False)
        elif path.is_dir() and not any(_parquet(path)):
            found = datasets.load_from_disk(str(path))
        else:
            splits = _parquet_splits(path)
            found = datasets.load_dataset("parquet", data_files=splits, trust_remote_code=False)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        if path.exists():
            raise ValueError(f"cannot read the data set in {path}: {error}") from error
        raise OSError(
            f"cannot get the data set {entry.source!r} from the Hugging Face hub ({error}). A local"
            f" path works without the hub: a data set saved with save_to_disk, parquet files, or "
            f"{local}"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    return dict(found) if isinstance(found, dict) else {"train": found}


def _parquet(folder: Path) -> Any:
    return (path for path in folder.rglob("*.parquet") if path.is_file())


def _parquet_splits(path: Path) -> dict[str, list[str]]:
    if path.is_file():
        return {"train": [str(path)]}
    found: dict[str, list[str]] = {}
    for file in sorted(_parquet(path)):
        words = re.split(r"[^a-z]+", file.relative_to(path).as_posix().lower())
        split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")
        found.setdefault(split, []).append(str(file))
    if "" in found and len(found) > 1:
        unclear = ", ".join(Path(name).name for name in found[""])
        raise ValueError(f"some file names have a split and others do not: {unclear}")
    return found if "" not in found else {"train": found[""]}


def name_splits(theirs: tuple[str, ...], wanted: Mapping[str, str | None]) -> dict[str, str]:
    """Map our names of splits to theirs: as requested, else by their names."""
    found = {SPLIT_WORDS[name.lower()]: name for name in theirs if name.lower() in SPLIT_WORDS}
    if len(theirs) == 1:
        found = {"train": theirs[0]}
    if unknown := set(wanted) - {"train", "validation", "test"}:
        raise ValueError(f"splits are train, validation and test, got {', '.join(sorted(unknown))}")
    named = {ours: name for ours, name in {**found, **wanted}.items() if name is not None}
    missing = [name for name in named.values() if name not in theirs]
    if missing or "train" not in named:
        what = f"no split {missing[0]!r}" if missing else "no split for training"
        advice = "choose with `splits`, such as test=validation"
        raise ValueError(f"{what}; the data set has {', '.join(theirs)}: {advice}")
    if len(set(named.values())) < len(named):
        raise ValueError(f"a split cannot be used twice, got {named}")
    return named


def _holds_splits(table: Any, column: str) -> bool:
    """Whether a text column holds the split of each row."""
    if column not in table.features or table.features[column].dtype not in (
        "string",
        "large_string",
    ):
        return False
    return all(v is not None and v.lower() in SPLIT_WORDS for v in table.unique(column))
