"""Checkpoints: written atomically, verified by checksums, the last two kept.

A checkpoint is a folder ``step-00000120`` with the weights (`model.safetensors`), the rest of the
state (`state.pt`, read with ``weights_only=True``), the version (`state.json`) and
`checksums.json`. It is written under another name, synced to disk and then renamed, so a process
that is killed or runs out of disk space leaves earlier checkpoints untouched. A checkpoint with any
changed bit is moved aside, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Mapping
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flops.errors import FlopsError
from flops.storage.disk import UNWRITABLE
from flops.storage.files import UNFINISHED, sync_directory, sync_file
from flops.storage.plain import parse_object

SCHEMA = 2
KEEP = 2
DAMAGED, SKIPPED = "damaged-", "skipped-"
FILES = ("model.safetensors", "state.pt", "state.json")


UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
    RuntimeError,
    pickle.UnpicklingError,
)


class CheckpointError(FlopsError):
    """A checkpoint is damaged or missing."""


class UnusableError(CheckpointError):
    """A checkpoint cannot be read here, but may be intact."""


def save(
    folder: Path, step: int, weights: Mapping[str, Tensor], state: Any, version: str | None = None
) -> Path:
    """Write a checkpoint and remove all but the last two.

    Args:
        folder: Folder of the checkpoints; created if missing.
        step: Number of the step; a checkpoint of the same step is replaced.
        weights: The model's state_dict.
        state: Numbers, strings and tensors, in dicts, lists and tuples.
        version: Version of this library, for error messages of later ones.

    Returns:
        Its folder.

    Raises:
        OSError: It cannot be written (or safetensors' own error); nothing is left behind.
        TypeError: The state holds another type.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:08d}"
    scratch = folder / f"{UNFINISHED}{place.name}"
    _remove(scratch)
    state = _plain(state)
    document = {"schema": SCHEMA, "step": step, "version": version}
    try:
        scratch.mkdir()
        save_file(_separate(weights), scratch / "model.safetensors", metadata={"format": "pt"})
        _save_state(scratch / "state.pt", state)
        _write(scratch / "state.json", document)
        _write(scratch / "checksums.json", {name: _checksum(scratch / name) for name in FILES})
        for path in scratch.iterdir():
            sync_file(path)
        sync_directory(scratch)
        if place.exists():  # from before a rollback; not needed to resume
            _retire(place)
        scratch.rename(place)
    except UNWRITABLE:
        shutil.rmtree(scratch, ignore_errors=True)  # it may be filling the disk
        raise
    sync_directory(folder)
    for old in steps(folder)[:-KEEP]:
        _retire(old)
    return place


def steps(folder: Path) -> list[Path]:
    """The checkpoints, from first to last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Verify a checkpoint, and return its weights and state.

    Raises:
        CheckpointError: If it is damaged or of another version.
    """
    try:
        expected = parse_object((path / "checksums.json").read_bytes())
        for name in expected:
            if _checksum(path / name) != expected[name]:
                raise CheckpointError(
                    f"checkpoint {path.name} is damaged: {name} fails its checksum"
                )
        document = parse_object((path / "state.json").read_bytes())
        if document["schema"] != SCHEMA:
            wrote = document.get("version") or "another version"
            raise UnusableError(
                f"checkpoint {path.name} has schema {document['schema']}, this version reads "
                f"{SCHEMA}; continue the run with the flops version that wrote it ({wrote})"
            )
        if unchecked := [name for name in FILES if name not in expected]:
            raise ValueError(f"no checksum of {unchecked[0]}")
        weights = {n: t.clone() for n, t in load_file(path / "model.safetensors").items()}
        return weights, torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except PermissionError as error:  # it may be intact: do not fall back
        raise UnusableError(f"cannot read {error.filename}: {error.strerror}") from error
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"checkpoint {path.name} is damaged: {missing} is missing") from error
    except (*UNREADABLE, *UNWRITABLE) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {error}") from error


def restore(folder: Path, which: str = "last") -> tuple[dict[str, Tensor], Any] | None:
    """The last intact checkpoint, or the one before it; None if none was written yet.

    Damaged and skipped checkpoints are renamed, so that they are not read again; damaged ones with
    a warning.

    Raises:
        CheckpointError: If none is intact, or one is of another version.
    """
    found = steps(folder)
    if which == "previous":
        if len(found) < 2:
            raise CheckpointError(f"there is no previous checkpoint in {folder}")
        loaded = load(found[-2])
        _move_aside(found[-1], SKIPPED)
        return loaded
    intact, damaged = _newest(found)
    for other in damaged:  # only if there is one to continue from
        _move_aside(other, DAMAGED)
    return intact


def last_intact(folder: Path) -> tuple[dict[str, Tensor], Any] | None:
    """The last intact checkpoint, with a warning about damaged ones; None if none was written yet.

    Nothing is changed.

    Raises:
        CheckpointError: If none is intact, or one is of another version.
    """
    return _newest(steps(folder))[0]


def _newest(found: list[Path]) -> tuple[tuple[dict[str, Tensor], Any] | None, list[Path]]:
    """The last intact checkpoint, and the damaged ones after it."""
    damaged: dict[Path, str] = {}
    for path in reversed(found):
        try:
            loaded = load(path)
        except UnusableError:
            raise
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        for said in damaged.values():
            warnings.warn(f"{said}; taking {path.name}, which is intact", stacklevel=5)
        return loaded, list(damaged)
    if damaged:
        every = "; ".join(damaged.values())
        raise CheckpointError(f"{every}. There is no other checkpoint: start a new run")
    return None, []


def _move_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{why}{path.name}")
    _remove(aside)
    path.rename(aside)
    sync_directory(path.parent)


def clean(folder: Path) -> None:
    """Remove partial checkpoints of killed processes."""
    for path in folder.glob(f"{UNFINISHED}*"):
        _remove(path)


def _retire(path: Path) -> None:
    """Remove a checkpoint; a kill never leaves a part of it under its name."""
    scratch = path.with_name(f"{UNFINISHED}old-{path.name}")
    _remove(scratch)
    path.rename(scratch)
    _remove(scratch)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")


class _File:
    """An open file that keeps its OSError, which `torch.save` replaces with its own."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_state(path: Path, state: Any) -> None:
    """Write a state that `torch.load(weights_only=True)` reads; see `save` for its types."""
    _save_state(path, _plain(state))


def _save_state(path: Path, state: Any) -> None:
    with path.open("wb") as file:
        kept = _File(file)
        try:
            torch.save(state, cast(IO[bytes], kept))
        except RuntimeError as error:
            raise kept.error or error from error


def _plain(value: Any, path: str = "") -> Any:
    """Convert to types that `torch.load(weights_only=True)` reads, with tensors on the CPU.

    Tensors keep their strides: another layout may change the order of summation, and a resumed run
    would differ from an uninterrupted one by rounding.
    """
    if isinstance(value, np.generic):  # before floats: a numpy double is also a Python float
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return type(value)(_plain(v, f"{path}/{i}") for i, v in enumerate(value))
    if isinstance(value, dict):
        return {_plain(k, f"{path}/{k}"): _plain(v, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone()  # not the whole storage of a view
    raise TypeError(f"cannot write a {type(value).__name__} at '{path or '/'}' of a state")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors; copied only where they share memory."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain
    return found


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
