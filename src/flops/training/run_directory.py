"""The run directory: settings, environment, metrics, checkpoints.

| file | what |
|---|---|
| config.json | the settings, as `--config` reads them |
| environment.json | versions, cores, the commit if there is one |
| metrics.jsonl | a line for every step and every evaluation |
| checkpoints/ | the last two, see `flops.training.checkpoint` |
| counts.safetensors | queries of each training point at its last visit |
| curves.png, allocation.png | plots of metrics.jsonl and counts.safetensors |
| result.json | accuracy and cost at the end, with the peak memory |
| model/ | the trained model in the format of `transformers`, or the adapter of an alignment |
| report.md | of an alignment: evaluations, and generated captions before and after |
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, Timeout
from torch import Tensor

from flops.errors import FlopsError
from flops.storage.disk import UNWRITABLE, DiskError, reason, remove
from flops.storage.files import UNFINISHED, atomic_write, safe_name
from flops.storage.locks import acquire_lock
from flops.training import checkpoint as checkpoints
from flops.training.config import ConfigError, RunConfig, Settings, read_file
from flops.training.environment import environment, rounding
from flops.version import __version__

LENGTHS = ("epochs", "steps", "budget")  # settings that a resumed run may change


class RunDirectoryError(FlopsError):
    """A folder is in use, or not a run directory."""


class RunDirectory:
    """An open run directory, for one process at a time.

    Training continues while the disk is full: lines of metrics are kept in memory, and writing is
    retried at every line and every checkpoint.

    Args:
        path: The folder.
        lock: Its lock, from `_lock`.
    """

    def __init__(self, path: Path, lock: BaseFileLock) -> None:
        self.path = path
        self._lock = lock
        self._metrics: FileIO = (path / "metrics.jsonl").open("ab", buffering=0)
        self._pending = b""  # metrics that could not be written yet
        self._warned = False

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Create the directory of a new run.

        Raises:
            RunDirectoryError: If the folder is not empty or not writable.
        """
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)  # first, so that of two processes that start here only one goes on
            try:
                check_free(path)
                _write(path / "environment.json", environment())
                _write(path / "config.json", config.to_dict())  # last: it marks the folder as a run
                return cls(path, lock)
            except BaseException:
                lock.release()
                raise

    @classmethod
    def reopen(cls, path: Path, which: str = "last") -> tuple[RunDirectory, Any]:
        """Open a run to resume it, with its metrics truncated to the checkpoint.

        Returns:
            The folder, and (weights, state) of the checkpoint; None to start from the beginning.

        Raises:
            RunDirectoryError: If this is not a run, or is in use by another process.
            CheckpointError: If the checkpoint is damaged.
        """
        check_run(path)
        with _writing(path):
            run = cls(path, _lock(path))
        try:
            for left in path.glob(f"{UNFINISHED}*"):  # of killed processes
                remove(left)
            restored = run._roll_back(which)
            _warn_if_environment_changed(
                path, {} if restored is None else restored[1].get("rounding", {})
            )
            return run, restored
        except BaseException:
            run.close()
            raise

    def changes_length(self, config: RunConfig) -> bool:
        """Whether the run is resumed with another length than it was started with."""
        kept, now = read_file(self.path / "config.json"), config.to_dict()
        return any(kept.get(name) != now[name] for name in LENGTHS)

    def record_length(self, config: RunConfig) -> None:
        """Write the length of the run into its settings.

        Raises:
            RunDirectoryError: If they cannot be written.
        """
        now = config.to_dict()
        kept = read_file(self.path / "config.json") | {name: now[name] for name in LENGTHS}
        with _writing(self.path):
            _write(self.path / "config.json", kept)

    def _roll_back(self, which: str) -> tuple[dict[str, Tensor], Any] | None:
        """Load the checkpoint and truncate the metrics to its step."""
        place = self.path / "checkpoints"
        checkpoints.clean(place)
        restored = checkpoints.restore(place, which)
        size = 0 if restored is None else int(restored[1]["metrics"])
        if os.fstat(self._metrics.fileno()).st_size < size:
            file = self.path / "metrics.jsonl"
            raise RunDirectoryError(f"{file} is shorter than at the checkpoint: lines are missing")
        self._metrics.truncate(size)
        return restored

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics; if the disk is full, it is written with a later one."""
        text = json.dumps(_finite(line), allow_nan=False)
        self._pending += text.encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            self._say(error)

    def _flush(self) -> None:
        while self._pending:
            self._pending = self._pending[self._metrics.write(self._pending) :]

    def save(
        self, step: int, weights: dict[str, Tensor], state: dict[str, Any], last: bool = False
    ) -> None:
        """Write a checkpoint, with the length of the metrics and what determines rounding.

        On failure the previous checkpoint is kept, with one warning until writing works again.

        Args:
            step: Number of the step.
            weights: Weights of the model.
            state: The rest of the state.
            last: Whether this is the last checkpoint of the run.

        Raises:
            DiskError: The last checkpoint cannot be written.
        """
        place = self.path / "checkpoints"
        try:
            self._flush()
            os.fsync(self._metrics.fileno())
            size = os.fstat(self._metrics.fileno()).st_size
            kept = {**state, "metrics": size, "rounding": rounding()}
            checkpoints.save(place, step, weights, kept, __version__)
        except UNWRITABLE as error:
            if last:
                raise DiskError(
                    f"cannot write to {self.path}: {reason(error)}; training is complete, but its "
                    f"end is not saved: free some space and resume the run {self._from()}"
                ) from error
            self._say(error)
            return
        self._warned = False

    def _say(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot write to {self.path}: {reason(error)}; training continues, and writing is "
                f"retried at every checkpoint; a run resumed now would continue {self._from()}",
                stacklevel=4,
            )

    def _from(self) -> str:
        found = checkpoints.steps(self.path / "checkpoints")
        return f"from {found[-1].name}" if found else "from the beginning"

    def close(self) -> None:
        """Release the folder."""
        with suppress(OSError):
            self._metrics.close()
        self._lock.release()


def check_free(path: Path) -> None:
    """Raise if a folder cannot become a new run directory.

    Raises:
        RunDirectoryError: If it is not empty or not writable.
    """
    with _writing(path):
        above = next(p for p in (path, *path.parents) if p.exists())
    if is_run(path):
        raise RunDirectoryError(
            f"{path} already holds a run; continue it with --resume {path}, or choose another "
            "--output"
        )
    if not above.is_dir():
        raise RunDirectoryError(f"{above} is a file; choose another --output")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"{above} is not writable; choose another --output")
    known = (UNFINISHED, ".", "environment.json")  # left by a process that was killed at startup
    found = path.iterdir() if path.exists() else ()
    if others := [p.name for p in found if not p.name.startswith(known)]:
        raise RunDirectoryError(
            f"{path} is not empty (it holds {others[0]}); choose another --output"
        )


def is_run(path: Path) -> bool:
    """Whether a run was started here."""
    return (path / "config.json").is_file()


def check_run(path: Path) -> None:
    """Raise if a folder holds no run.

    Raises:
        RunDirectoryError: If there is no run.
    """
    if not is_run(path):
        raise RunDirectoryError(
            f"{path} holds no run (there is no config.json); give the folder that `flops finetune` "
            "or `flops align` wrote"
        )


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """The settings of a run, with defaults for missing ones.

    Args:
        path: The run directory.
        kind: Configuration of the command that made it.

    Raises:
        RunDirectoryError: If there is no run.
        ConfigError: If its settings are not of this kind.
    """
    check_run(path)
    values = read_file(path / "config.json")
    try:
        return kind(**values)
    except ConfigError as error:
        wrote = _environment(path).get("packages", {}).get("flops-torch")
        if wrote in (None, __version__):
            other = sorted(values.keys() - kind.model_fields.keys())
            if len(other) > 1:  # one may be a typo, which has an explanation
                raise ConfigError(
                    f"{path} is a run of another command or --task: its config.json has "
                    f"'{other[0]}', which this one does not know"
                ) from error
            raise
        raise ConfigError(
            f"{error} (in {path / 'config.json'}, which flops {wrote} wrote; this is {__version__})"
        ) from error


def _environment(path: Path) -> dict[str, Any]:
    """Environment at the start of the run; empty if unknown."""
    try:
        found = read_file(path / "environment.json")
    except ConfigError:
        return {}
    return found if isinstance(found.get("packages", {}), dict) else {}


def _warn_if_environment_changed(path: Path, last: dict[str, Any]) -> None:
    """Warn if resuming cannot be bit-identical.

    Args:
        path: The run directory.
        last: What determined the rounding of the checkpoint; empty if unknown.
    """
    began, now = _environment(path), environment()
    before = {**began.get("packages", {}), **began, **last}
    present = {**now["packages"], **now}
    watched = [*now["packages"], "threads", "capability"]
    if "capability" not in before:  # of a run from before this was recorded
        watched.remove("capability")
    said = {"threads": "number of threads", "capability": "CPU capability"}
    changed = [
        f"{said.get(name, name)} {before.get(name)} (now {present[name]})"
        for name in watched
        if before.get(name) != present[name]
    ]
    if changed:
        warnings.warn(
            f"the run was at {', '.join(changed)}; it continues, but differs from an uninterrupted "
            "run by rounding",
            stacklevel=5,
        )


def new_folder(config: RunConfig, base: Path = Path("runs")) -> Path:
    """An unused folder name from data, method and seed."""
    names = (config.data, config.method, f"seed{config.seed}")
    name = safe_name("-".join(Path(part).name or "root" for part in names))
    number = 1
    while (path := base / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def _lock(path: Path) -> BaseFileLock:
    """Lock the folder until the process ends."""
    try:
        return acquire_lock(path / ".lock", mode=0o644)
    except Timeout as error:
        raise RunDirectoryError(f"another process is training in {path}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {path}: {error.strerror}") from error


def _write(path: Path, values: Any) -> None:
    atomic_write(path, json.dumps(values, indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
