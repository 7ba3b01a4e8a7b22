"""Error messages for full disks, and folders that are filled atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flops.errors import FlopsError
from flops.storage.files import UNFINISHED, sync_directory, sync_file

# Errors of writing: safetensors wraps those of the system.
UNWRITABLE = (OSError, SafetensorError)
MEASURED = "free some space and run it again: completed measurements are kept"  # for studies


class DiskError(FlopsError):
    """A file cannot be written: the disk is full, read-only or missing."""


def reason(error: BaseException) -> str:
    """The system's message about a failed write."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Convert errors of writing to `DiskError`.

    Args:
        path: File or folder that is written.
        advice: What the user should do.

    Raises:
        DiskError: Writing failed.
    """
    try:
        yield
    except UNWRITABLE as error:
        raise DiskError(f"cannot write to {path}: {reason(error)}; {advice}") from error


@contextmanager
def filling(path: Path, last: str) -> Iterator[Path]:
    """A temporary folder, whose files are moved to their destination at the end.

    Args:
        path: Destination; other files in it are kept.
        last: File to move after the others, as a mark of completeness.
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
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
