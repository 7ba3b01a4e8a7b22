"""Files that are whole or absent, and names that every system takes.

Systems differ in what may be synced: POSIX wants the folder of a new name to be synced too, Windows
neither opens folders nor syncs a file that was opened for reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = "unfinished-"  # what a killed process leaves behind starts with it
_RESERVED = re.compile(r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\.|$)", re.IGNORECASE)


def atomic_write(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file beside its place and move it there, so that it is whole or absent.

    Args:
        path: Where it goes; a file that is there is replaced.
        content: Text is written as UTF-8, with line ends as they are.
        durable: Whether it must outlive a loss of power: file and name are synced.
    """
    with replacing(path, durable=durable) as scratch:
        scratch.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A name to write to; at the end that file takes its place, after an error it is removed.

    Args:
        path: Where it goes; a file that is there is replaced.
        durable: Whether it must outlive a loss of power: file and name are synced.
    """
    scratch = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    try:
        yield scratch
        if durable:
            sync_file(scratch)
        os.replace(scratch, path)  # rename() refuses to replace on Windows
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make sure that what was written to a file is on the disk."""
    # Windows syncs only what is open for writing.
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make sure that the names in a folder are on the disk, where the system lets one ask."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders; NTFS keeps names in its journal
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems sync no folders
        pass
    finally:
        os.close(descriptor)


def safe_name(text: str) -> str:
    """The text as a name of a file or folder that Windows takes too.

    Characters that some system refuses become ``-``, as do dots and blanks at the end; names of
    devices (``nul``, ``com1``) get a ``_`` in front. A text that is fine comes back unchanged.
    """
    name = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "-", text)
    name = re.sub(r"[. ]+$", lambda end: "-" * len(end[0]), name)
    return f"_{name}" if _RESERVED.match(name) or not name else name
