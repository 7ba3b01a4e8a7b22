"""Checkpoints: whole or absent, checked before they are used, the last two kept.

A checkpoint is a folder ``step-00000120`` with the weights (`model.safetensors`), the rest of the
state (`state.safetensors` and `state.json`, see `flops.training.trees`) and `checksums.json`. It is
written under another name, synced to disk and then renamed, so that a process that is killed at any
moment, or that finds the disk full, leaves the checkpoints before it untouched. One that has
changed since, by as little as a bit, is put aside, and the one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from flops.errors import FlopsError
from flops.storage.disk import UNWRITABLE
from flops.storage.files import UNFINISHED, sync_directory, sync_file
from flops.storage.plain import parse_object
from flops.training.trees import decode, encode, separate

SCHEMA = 1
KEEP = 2
DAMAGED = "damaged-"
FILES = ("model.safetensors", "state.safetensors", "state.json")


class CheckpointError(FlopsError):
    """A checkpoint is damaged, or there is none."""


class UnusableError(CheckpointError):
    """A checkpoint may be whole, and yet cannot be read here."""


def save(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Any, version: str | None = None
) -> Path:
    """Write a checkpoint, and remove all but the last two.

    Args:
        folder: Holds the checkpoints; it is made if it is not there.
        step: Names the checkpoint; one of the same step is replaced.
        weights: The model's state_dict.
        state: A tree of plain values, tensors and arrays.
        version: Of this library, for a later one that cannot read it.

    Returns:
        Its folder.

    Raises:
        OSError: It cannot be written, or safetensors' own error; nothing is left of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:08d}"
    scratch = folder / f"{UNFINISHED}{place.name}"
    _remove(scratch)
    plain, tensors = encode(state)
    document = {"schema": SCHEMA, "step": step, "version": version, "state": plain}
    try:
        scratch.mkdir()
        save_file(separate(weights), scratch / "model.safetensors", metadata={"format": "pt"})
        save_file(tensors, scratch / "state.safetensors")
        _write(scratch / "state.json", document)
        _write(scratch / "checksums.json", {name: _checksum(scratch / name) for name in FILES})
        for path in scratch.iterdir():
            sync_file(path)
        sync_directory(scratch)
        if place.exists():  # of a run that was set back: what is there is not needed to resume
            _retire(place)
        scratch.rename(place)
    except UNWRITABLE:
        shutil.rmtree(scratch, ignore_errors=True)  # it may be what fills the disk
        raise
    sync_directory(folder)
    for old in steps(folder)[:-KEEP]:
        _retire(old)
    return place


def steps(folder: Path) -> list[Path]:
    """The checkpoints, from first to last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Weights and state of a checkpoint, after a look at its checksums.

    Raises:
        CheckpointError: If it is damaged or of another version.
    """
    try:
        expected = parse_object((path / "checksums.json").read_bytes())
        for name in FILES:
            if _checksum(path / name) != expected[name]:
                raise CheckpointError(f"checkpoint {path.name} is damaged: {name} was changed")
        document = parse_object((path / "state.json").read_bytes())
        if document["schema"] != SCHEMA:
            wrote = document.get("version") or "another version"
            raise UnusableError(
                f"checkpoint {path.name} has schema {document['schema']}, this version reads "
                f"{SCHEMA}; use the version of flops that wrote it ({wrote})"
            )
        weights = {n: t.clone() for n, t in load_file(path / "model.safetensors").items()}
        return weights, decode(document["state"], load_file(path / "state.safetensors"))
    except PermissionError as error:  # it may be whole: nothing to fall back from
        raise UnusableError(f"cannot read {error.filename}: {error.strerror}") from error
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"checkpoint {path.name} is damaged: {missing} is missing") from error
    except (ValueError, KeyError, TypeError, RecursionError, *UNWRITABLE) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {error}") from error


def restore(folder: Path, which: str = "last") -> tuple[dict[str, Tensor], Any] | None:
    """The last checkpoint that is whole, or the one before; None if none was written yet.

    One that is damaged, or that one goes back from, is put aside, under a name that is not looked
    at again, with a warning if nobody asked for it.

    Raises:
        CheckpointError: If none is whole, or one is of another version.
    """
    found = steps(folder)
    if which == "previous":
        if len(found) < 2:
            raise CheckpointError(f"there is no previous checkpoint in {folder}")
        loaded = load(found[-2])
        _put_aside(found[-1])
        return loaded
    damaged: dict[Path, str] = {}
    for path in reversed(found):
        try:
            loaded = load(path)
        except UnusableError:
            raise
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        for other, said in damaged.items():  # now that there is one to go on from
            warnings.warn(f"{said}; the run goes on from {path.name}, which is whole", stacklevel=4)
            _put_aside(other)
        return loaded
    if damaged:
        every = "; ".join(damaged.values())
        raise CheckpointError(f"{every}. There is no other one: start a new run")
    return None


def _put_aside(path: Path) -> None:
    aside = path.with_name(f"{DAMAGED}{path.name}")
    _remove(aside)
    path.rename(aside)
    sync_directory(path.parent)


def clean(folder: Path) -> None:
    """Remove what a killed process left behind."""
    for path in folder.glob(f"{UNFINISHED}*"):
        _remove(path)


def _retire(path: Path) -> None:
    """Remove a checkpoint, in such a way that a kill never leaves half of it under its name."""
    scratch = path.with_name(f"{UNFINISHED}old-{path.name}")
    _remove(scratch)
    path.rename(scratch)
    _remove(scratch)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
