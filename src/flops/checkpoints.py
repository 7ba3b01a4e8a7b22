"""Checkpoints: whole or absent, checked before they are used, the last two kept.

A checkpoint is a folder ``step-00000120`` with the weights (`model.safetensors`), the rest of the
state (`state.safetensors` and `state.json`, see `flops.trees`) and `checksums.json`. It is written
under another name, synced to disk and then renamed, so that a process that is killed at any moment
leaves the checkpoints before it untouched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flops.errors import FlopsError
from flops.files import UNFINISHED, sync_directory, sync_file
from flops.trees import decode, encode, separate

SCHEMA = 1
KEEP = 2
DAMAGED = "damaged-"
FILES = ("model.safetensors", "state.safetensors", "state.json")


class CheckpointError(FlopsError):
    """A checkpoint is damaged, or there is none."""


def save(folder: Path, step: int, weights: Mapping[str, Tensor], state: Any) -> Path:
    """Write a checkpoint, and remove all but the last two.

    Args:
        folder: Holds the checkpoints; it is made if it is not there.
        step: Names the checkpoint; one of the same step is replaced.
        weights: The model's state_dict.
        state: A tree of plain values, tensors and arrays.

    Returns:
        Its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:08d}"
    scratch = folder / f"{UNFINISHED}{place.name}"
    _remove(scratch)
    scratch.mkdir()
    plain, tensors = encode(state)
    save_file(separate(weights), scratch / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, scratch / "state.safetensors")
    _write(scratch / "state.json", {"schema": SCHEMA, "step": step, "state": plain})
    _write(scratch / "checksums.json", {name: _checksum(scratch / name) for name in FILES})
    for path in scratch.iterdir():
        sync_file(path)
    sync_directory(scratch)
    if place.exists():  # of a run that was set back: what is there is not needed to resume
        _retire(place)
    scratch.rename(place)
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
        expected = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
        for name in FILES:
            if _checksum(path / name) != expected[name]:
                raise CheckpointError(f"checkpoint {path.name} is damaged: {name} was changed")
        document = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise CheckpointError(
                f"checkpoint {path.name} has schema {document['schema']}, this version reads "
                f"{SCHEMA}; use the version of flops that wrote it"
            )
        weights = {n: t.clone() for n, t in load_file(path / "model.safetensors").items()}
        return weights, decode(document["state"], load_file(path / "state.safetensors"))
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"checkpoint {path.name} is damaged: {missing} is missing") from error
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {error}") from error


def restore(folder: Path, which: str = "last") -> tuple[dict[str, Tensor], Any] | None:
    """The last checkpoint, or the one before; None if none was written yet.

    Going back to the previous one puts the last aside, under a name that is not looked at again.

    Raises:
        CheckpointError: If it is damaged; the message says which one is left.
    """
    found = steps(folder)
    if which == "previous":
        if len(found) < 2:
            raise CheckpointError(f"there is no previous checkpoint in {folder}")
        loaded = load(found[-2])
        aside = folder / f"{DAMAGED}{found[-1].name}"
        _remove(aside)
        found[-1].rename(aside)
        sync_directory(folder)
        return loaded
    if not found:
        return None
    try:
        return load(found[-1])
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_offer(found[:-1])}") from error


def clean(folder: Path) -> None:
    """Remove what a killed process left behind."""
    for path in folder.glob(f"{UNFINISHED}*"):
        _remove(path)


def _offer(others: list[Path]) -> str:
    if not others:
        return "There is no other one: start a new run"
    try:
        load(others[-1])
    except CheckpointError as error:
        return f"The one before is no better ({error}): start a new run"
    return f"{others[-1].name} is whole: add --checkpoint previous to continue from there"


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
