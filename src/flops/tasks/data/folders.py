"""Image folders: one per class, optionally inside one per split."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flops.optional import require
from flops.tasks.data.splits import SPLIT_WORDS, Listing

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_LAYOUT = (
    "a folder needs <class>/*.png, or train/<class>/*.png with optional validation and test "
    f"beside train; images end in {', '.join(EXTENSIONS)}"
)


@dataclass(frozen=True)
class Files:
    """Image files by their paths."""

    paths: tuple[Path, ...]

    def open(self, row: int) -> Image:
        """Open a file."""
        return open_image(self.paths[row])

    def name(self, row: int) -> str:
        """Return its path; bytes that are not UTF-8 are escaped, so that it can be printed."""
        return os.fsencode(self.paths[row]).decode("utf-8", "backslashreplace")


def open_image(path: Path) -> Image:
    """Open an image file, to be closed by the caller.

    Raises:
        OSError: It is missing, not an image, or not a regular file (reading a pipe would block).
    """
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind):
        names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise OSError(f"it is {names.get(stat.S_IFMT(kind), 'a device')}, not a file")
    image: Image = require("PIL.Image").open(path)
    return image


def read_folder(folder: Path) -> tuple[dict[str, Listing], tuple[str, ...]]:
    """List the images of a folder, class by class and file by file in the order of their names.

    `folder/<class>/*.png` is one split, returned as "train". With a subfolder `train` (or
    `training`), it and its neighbours `validation` (`val`, `valid`, `dev`) and `test` (`testing`)
    are splits with the class folders inside. Images may be in subfolders of their class. Other
    files, and names that begin with a dot, are ignored.

    Returns:
        The splits, not decoded, and the classes: names of the training folders, sorted.

    Raises:
        ValueError: There are no classes, a class folder has no images, a split has a class that
            is not in train, or two folders are the same split.
    """
    folders = _subfolders(folder)
    roots: dict[str, Path] = {}
    for path in folders:
        split = SPLIT_WORDS.get(path.name.lower())
        if split is not None and split in roots:
            both = f"{roots[split].name} and {path.name}"
            raise ValueError(f"{folder} has two folders for {split}: {both}; keep one")
        if split is not None:
            roots[split] = path
    if "train" not in roots:
        if roots and len(roots) == len(folders):
            raise ValueError(f"{folder} has {', '.join(sorted(roots))} and no train: {_LAYOUT}")
        roots = {"train": folder}  # a class may well be called "test"
    names = tuple(path.name for path in _subfolders(roots["train"]))
    for name in names:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:  # raised here rather than when results are written
            shown_as = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise ValueError(
                f"the class folder {shown_as} in {roots['train']} has a name that is not UTF-8: "
                "rename it"
            ) from error
    if not names:
        raise ValueError(f"no class folders in {roots['train']}: {_LAYOUT}")
    codes = {name: code for code, name in enumerate(names)}
    return {split: _read_split(root, codes) for split, root in roots.items()}, names


def _read_split(root: Path, codes: Mapping[str, int]) -> Listing:
    paths: list[Path] = []
    labels: list[int] = []
    for folder in _subfolders(root):
        if folder.name not in codes:
            raise ValueError(
                f"{folder} is not a class of the training images, which are {shown(codes)}: "
                "move it there too, or remove it"
            )
        found = sorted(path for path in folder.rglob("*") if _is_image(path.relative_to(folder)))
        found = [
            path for path in found if not path.is_dir()
        ]  # a dangling link counts as a missing image
        if not found:
            raise ValueError(f"the class folder {folder} has no images: {_LAYOUT}")
        paths += found
        labels += [codes[folder.name]] * len(found)
    if not paths:
        raise ValueError(f"no class folders in {root}: {_LAYOUT}")
    return Listing(Files(tuple(paths)), np.arange(len(paths)), np.array(labels, np.int64))


def shown(names: Mapping[str, int], most: int = 12) -> str:
    """Return names for a message: all, or the first ones and their number."""
    listed = list(names)
    if len(listed) <= most:
        return ", ".join(listed)
    return f"{', '.join(listed[:most])}, ... ({len(listed)} in all)"


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _is_image(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in EXTENSIONS and not hidden
