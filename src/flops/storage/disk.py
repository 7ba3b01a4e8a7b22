"""What to do when a disk is full or a file cannot be written: say so, and leave nothing half."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flops.errors import FlopsError
from flops.storage.files import UNFINISHED, sync_directory, sync_file

# What writing raises: safetensors has an error of its own for what the system refuses.
UNWRITABLE = (OSError, SafetensorError)
MEASURED = "make room, and run it again: what was measured is kept"  # advice of a study


class DiskError(FlopsError):
    """Files cannot be written: the disk is full, read-only or gone."""


def reason(error: BaseException) -> str:
    """Why a file could not be written, in the system's words."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Turn what goes wrong with writing into a sentence.

    Args:
        path: What is written, or the folder that it goes to.
        advice: What to do after there is room again.

    Raises:
        DiskError: It cannot be written.
    """
    try:
        yield
    except UNWRITABLE as error:
        raise DiskError(f"cannot write to {path}: {reason(error)}; {advice}") from error


@contextmanager
def filling(path: Path, last: str) -> Iterator[Path]:
    """A folder to write to; at the end its files are moved to their place, all whole.

    Args:
        path: Where the files go; others that are there stay.
        last: The file that is moved after the others, so that it says that all are there.
    """
    scratch = path.with_name(f"{UNFINISHED}{path.name}")
    remove(scratch)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        files = sorted(scratch.iterdir(), key=lambda file: (file.name == last, file.name))
        for file in files:
            sync_file(file)
        path.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, path / file.name)
        sync_directory(path)
    finally:
        remove(scratch)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
