"""Atomic writes, and file names that are valid on every system.

Systems differ in syncing: POSIX requires that the folder of a new file is synced too; Windows can
neither open folders nor sync a file that is open for reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = "unfinished-"  # prefix of temporary files
_RESERVED = re.compile(r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\.|$)", re.IGNORECASE)


def atomic_write(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file atomically: under a temporary name, then renamed.

    Args:
        path: File to write or replace.
        content: Text is written as UTF-8, with line ends unchanged.
        durable: Sync file and folder, so that it survives a power failure.
    """
    with replacing(path, durable=durable) as scratch:
        scratch.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary name to write to; renamed at the end, removed after an error.

    Args:
        path: File to write or replace.
        durable: Sync file and folder, so that it survives a power failure.
    """
    scratch = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    try:
        yield scratch
        if durable:
            sync_file(scratch)
        os.replace(scratch, path)  # on Windows, rename() does not replace
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    # Windows only syncs files that are open for writing.
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush the entries of a folder to disk, if the system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders; NTFS journals names
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot sync folders
        pass
    finally:
        os.close(descriptor)


def safe_name(text: str) -> str:
    """The text as a file name that is valid on every system, including Windows.

    Invalid characters, and trailing dots and blanks, become ``-``; device names (``nul``, ``com1``)
    are prefixed with ``_``. A valid name is returned unchanged.
    """
    name = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "-", text)
    name = re.sub(r"[. ]+$", lambda end: "-" * len(end[0]), name)
    return f"_{name}" if _RESERVED.match(name) or not name else name
