"""The run folder: settings, environment, metrics, checkpoints.

| file | what |
|---|---|
| config.json | the settings, as `--config` reads them |
| environment.json | versions, cores, the commit if there is one |
| metrics.jsonl | a line for every step and every evaluation |
| checkpoints/ | the last two, see `flops.checkpoints` |
| counts.safetensors | queries of each training point when it was last seen |
| curves.png, allocation.png | drawn from metrics.jsonl and counts.safetensors alone |
| model/ | the trained model, as `transformers` reads it, or the adapter of an alignment |
| report.md | of an alignment: evaluations, and what is said of some images before and after |
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any

from torch import Tensor

from flops import checkpoints
from flops.environment import environment
from flops.errors import FlopsError
from flops.files import UNFINISHED, atomic_write, safe_name
from flops.options import Config
from flops.settings import RunConfig, Settings, merged, read_file


class RunFolderError(FlopsError):
    """A run folder is in use, or is none."""


class RunFolder:
    """An open run folder; one process at a time.

    Args:
        path: The folder.
        lock: What `_lock` returned for it.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock
        self._metrics: BufferedWriter = (path / "metrics.jsonl").open("ab")

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """A new run.

        Raises:
            RunFolderError: If the folder holds a run, or anything else, or cannot be written to.
        """
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)  # first: of two that start here at once, one must see the other
            try:
                check_free(path)
                _write(path / "environment.json", environment())
                _write(path / "config.json", config.to_dict())  # last: it makes the folder a run
                return cls(path, lock)
            except BaseException:
                _unlock(lock)
                raise

    @classmethod
    def reopen(cls, path: Path, which: str = "last") -> tuple[RunFolder, Any]:
        """A run to be continued, and the state that its metrics are cut back to.

        Returns:
            The folder, and (weights, state) of the checkpoint; None to start from the beginning.

        Raises:
            RunFolderError: If this is no run, or another process is at it.
            CheckpointError: If the checkpoint is damaged.
        """
        check_run(path)
        before, now = read_file(path / "environment.json"), environment()
        versions = before.get("packages", {})
        changed = [name for name, v in now["packages"].items() if v != versions.get(name)]
        if before.get("threads") != now["threads"]:  # sums are taken in another order
            changed.append(f"threads ({before.get('threads')}, now {now['threads']})")
        if changed:
            warnings.warn(
                f"other versions than at the start of the run: {', '.join(changed)}; what follows "
                "may differ from an unbroken run in the last digits",
                stacklevel=3,
            )
        with _writing(path):
            run = cls(path, _lock(path))
        try:
            return run, run._set_back(which)
        except BaseException:
            run.close()
            raise

    def _set_back(self, which: str) -> tuple[dict[str, Tensor], Any] | None:
        """The checkpoint, with the metrics cut back to its step."""
        place = self.path / "checkpoints"
        checkpoints.clean(place)
        restored = checkpoints.restore(place, which)
        size = 0 if restored is None else int(restored[1]["metrics"])
        if os.fstat(self._metrics.fileno()).st_size < size:
            file = self.path / "metrics.jsonl"
            raise RunFolderError(f"{file} is shorter than at the checkpoint; lines are missing")
        self._metrics.truncate(size)
        return restored

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        text = json.dumps(_finite(line), allow_nan=False)
        self._metrics.write(text.encode() + b"\n")
        self._metrics.flush()

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint that knows how long the metrics were."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        size = os.fstat(self._metrics.fileno()).st_size
        checkpoints.save(self.path / "checkpoints", step, weights, {**state, "metrics": size})

    def close(self) -> None:
        """Let go of the folder."""
        self._metrics.close()
        _unlock(self._lock)
        self._lock = None


def check_free(path: Path) -> None:
    """Refuse a folder that is in use, or cannot be made.

    Raises:
        RunFolderError: If it holds a run, or anything else, or cannot be written to.
    """
    with _writing(path):
        above = next(p for p in (path, *path.parents) if p.exists())
    if is_run(path):
        raise RunFolderError(
            f"{path} already holds a run; continue it with --resume {path}, or give another "
            "--output"
        )
    if not above.is_dir():
        raise RunFolderError(f"{above} is a file; give another --output")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"{above} cannot be written to; give another --output")
    known = (UNFINISHED, ".", "environment.json")  # left by a process that was killed at its start
    found = path.iterdir() if path.exists() else ()
    if others := [p.name for p in found if not p.name.startswith(known)]:
        raise RunFolderError(
            f"{path} is not empty (it holds {others[0]}); give an --output of its own"
        )


def is_run(path: Path) -> bool:
    """Whether a run was started here."""
    return (path / "config.json").is_file()


def check_run(path: Path) -> None:
    """Refuse a folder in which no run was started.

    Raises:
        RunFolderError: If there is no run.
    """
    if not is_run(path):
        raise RunFolderError(
            f"{path} holds no run (there is no config.json); start one without --resume"
        )


def read_config(path: Path) -> Config:
    """The settings of a run of `flops finetune`; errors as `read_settings`."""
    return read_settings(path, Config())


def read_settings(path: Path, defaults: Settings) -> Settings:
    """The settings of a run; those that it does not have are the defaults.

    Raises:
        RunFolderError: If there is no run.
        ConfigError: If its settings are not of this kind.
    """
    check_run(path)
    return merged(defaults, read_file(path / "config.json"))


def new_folder(config: RunConfig, base: Path = Path("runs")) -> Path:
    """A name that is free, made of data, method and seed."""
    names = (config.data, config.method, f"seed{config.seed}")
    name = safe_name("-".join(Path(part).name or "root" for part in names))
    number = 1
    while (path := base / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def _lock(path: Path) -> int | None:
    """Hold the folder until the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return None
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunFolderError(f"another process is training in {path}") from error
    return lock


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"cannot write to {path}: {error.strerror}") from error


def _write(path: Path, values: Any) -> None:
    atomic_write(path, json.dumps(values, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
