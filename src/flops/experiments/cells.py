"""Cells: the independent runs of a study, each saved when it completes, so that studies can resume.

A cell is one setting with one seed. Its result is written atomically to its own JSON file; a cell
whose file exists, with the same settings, is not run again. To measure it again after a change of
the code, delete the file or choose another folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flops.errors import FlopsError
from flops.experiments.cell_progress import CellProgress, Describe, method_of, warn_grouped
from flops.optional import MissingPackageError
from flops.passes.guards import DeferSignals
from flops.storage.disk import DiskError, reason
from flops.storage.files import atomic_write, safe_name
from flops.storage.plain import parse_object

Result = dict[str, Any]
LONGEST = 200  # longest file name, in bytes
# Of workers: one thread each, and no bars of packages, which would be drawn over each other.
WORKERS = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        part: Part of the study; a folder.
        measure: A module-level function from the settings to a result for JSON.
        settings: A frozen dataclass, with the seed among its fields.
    """

    part: str
    measure: Callable[[Any], Result]
    settings: Any

    @property
    def name(self) -> str:
        """The seed and all settings that differ from their defaults."""
        given = [
            f"{f.name}={getattr(self.settings, f.name)}"
            for f in dataclasses.fields(self.settings)
            if f.name == "seed" or getattr(self.settings, f.name) != f.default
        ]
        return ",".join(given)

    def path(self, folder: Path) -> Path:
        """File of the result, in the folder of its part."""
        name = safe_name(self.name)
        if name != self.name or len(os.fsencode(name)) > LONGEST:  # else names could collide
            name = f"{name[: LONGEST // 4]}-{self._digest}"
        return folder / "cells" / self.part / f"{name}.json"

    @property
    def _digest(self) -> str:
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:16]

    def _places(self, folder: Path) -> list[Path]:
        """Possible files of the result: older versions kept `/` and `:` in names."""
        name, parts = self.name, Path(self.name).parts
        if ".." in parts or any(len(os.fsencode(part)) > LONGEST for part in parts):
            name = f"{self.name.replace('/', '_')[: LONGEST // 4]}-{self._digest}"
        return [self.path(folder), folder / "cells" / self.part / f"{name}.json"]

    def load(self, folder: Path) -> Result | None:
        """The saved result, if it has the same settings."""
        return next((r for p in self._places(folder) if (r := self._read(p)) is not None), None)

    def forget(self, folder: Path) -> None:
        """Delete the result, so that the cell is run again."""
        for path in self._places(folder):
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Result | None:
        try:
            kept = parse_object(path.read_bytes())
        except (OSError, ValueError):  # missing, truncated, or an invalid name on this system
            return None
        defaults = {
            f.name: f.default
            for f in dataclasses.fields(self.settings)
            if f.default is not dataclasses.MISSING
        }  # of settings added after the result was written
        now = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        settings, result = kept.get("settings"), kept.get("result")
        if not isinstance(settings, dict) or not isinstance(result, dict):  # not a result
            return None
        return result if {**json.loads(json.dumps(defaults)), **settings} == now else None

    def seconds(self, folder: Path) -> float | None:
        """How long a saved cell took; None if it is not saved, or older versions saved it."""
        for path in self._places(folder):
            try:
                found = parse_object(path.read_bytes()).get("seconds")
            except (OSError, ValueError):
                continue
            if isinstance(found, int | float) and not isinstance(found, bool):
                return float(found)
        return None

    def save(self, folder: Path, result: Result, seconds: float | None = None) -> None:
        """Write the result, and how long it took, atomically."""
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: dict[str, Any] = {"settings": dataclasses.asdict(self.settings), "result": result}
        if seconds is not None:
            kept["seconds"] = round(seconds, 3)
        atomic_write(path, json.dumps(kept, indent=1) + "\n")


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    workers: int,
    console: Console,
    title: str,
    fresh: bool = False,
    describe: Describe | None = None,
) -> list[Result]:
    """Run the cells without a saved result, and return the results of all, in order.

    Args:
        cells: Cells to run.
        folder: Folder of the results.
        workers: Processes, with one thread each; 0 runs in this process.
        console: Shows the plan, then a bar with the time to go if it is a terminal, else a line
            for every finished cell.
        title: Name of these cells.
        fresh: Use a new process for each cell, for its own peak memory.
        describe: A result in a few words, for the line.

    Warnings of the cells are repeated at the end, one for each kind.

    A result that cannot be written, for instance to a full disk, is kept in memory and written as
    soon as possible, with one warning.

    Raises:
        FlopsError: If cells failed. The results of the others are saved.
        DiskError: If results could not be written at the end.
    """
    left = [cell for cell in cells if cell.load(folder) is None]
    failed: dict[str, BaseException] = {}
    unwritten: dict[Cell, Outcome] = {}
    warned: list[tuple[str, ...]] = []
    said = ""
    every, ours = ([cell.settings for cell in some] for some in (cells, left))
    known = _known_seconds(cells, folder) if left else {}
    with CellProgress(console, title, every, ours, known, workers, describe) as progress:
        for cell, found in _finished(left, folder, workers, fresh):
            warned.append(found.warnings)
            if found.error is not None and found.result is not None:
                unwritten[cell] = found
                if not said:
                    said = (
                        f"cannot write to {folder}: {reason(found.error)}; the study continues, "
                        "and results are written as soon as there is space"
                    )
                    warnings.warn(said, stacklevel=2)
            elif found.error is not None:
                failed[cell.name] = found.error
            _retry_writes(unwritten, folder)
            progress.finished(cell.settings, found.seconds, found.result)
    warn_grouped(warned)
    if unwritten:
        some = f"cannot write {len(unwritten)} of {len(left)} results to {folder}"
        advice = "free some space and run it again: these are measured again, the others are kept"
        raise DiskError(f"{some}: {said.partition(': ')[2].partition(';')[0]}; {advice}")
    if failed:
        name, error = next(iter(failed.items()))
        if isinstance(error, MissingPackageError):  # its message is sufficient
            raise error
        raise FlopsError(
            f"{len(failed)} of {len(left)} cells of '{title}' failed, first '{name}': {error!r}; "
            "the others are kept; run again to continue"
        ) from error
    return [result for cell in cells if (result := cell.load(folder)) is not None]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        error: Why it failed, or why its result could not be written; None if all went well.
        result: Its result; None if it failed.
        seconds: How long it took; None if it failed.
        warnings: What it warned of.
    """

    error: BaseException | None = None
    result: Result | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()


def _known_seconds(cells: Sequence[Cell], folder: Path) -> dict[str, list[float]]:
    """Seconds of saved cells, by method."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        if (seconds := cell.seconds(folder)) is not None:
            found.setdefault(method_of(cell.settings), []).append(seconds)
    return found


def _retry_writes(unwritten: dict[Cell, Outcome], folder: Path) -> None:
    """Retry writing."""
    for cell, found in list(unwritten.items()):
        assert found.result is not None
        try:
            cell.save(folder, found.result, found.seconds)
        except OSError:
            return
        del unwritten[cell]


def _finished(
    cells: Sequence[Cell], folder: Path, workers: int, fresh: bool
) -> Iterator[tuple[Cell, Outcome]]:
    """Cells as they complete."""
    if workers == 0:
        for cell in cells:
            yield cell, _attempt(cell, folder)
        return
    if not cells:
        return
    before = {name: os.environ.get(name) for name in WORKERS}
    os.environ.update(WORKERS)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(cells)),
        context,
        _start_worker,
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        with DeferSignals():  # a worker that is starting must get all it reads
            futures = {pool.submit(_attempt, cell, folder): cell for cell in cells}
        for future in as_completed(futures):
            failed = future.exception()  # the worker process died
            yield futures[future], Outcome(failed) if failed is not None else future.result()
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():  # else it waits for their runs
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_worker() -> None:
    """Set one torch thread; exit silently at Ctrl-C and when the parent process dies."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _attempt(cell: Cell, folder: Path) -> Outcome:
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = cell.measure(cell.settings)
        except Exception as error:
            return Outcome(error, warnings=_texts(caught))
    seconds = time.perf_counter() - started
    try:
        cell.save(folder, result, seconds)
    except OSError as error:  # keep a result that took long to measure
        return Outcome(error, result, seconds, _texts(caught))
    return Outcome(None, result, seconds, _texts(caught))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """Different warnings; those for developers of other packages are left out."""
    shown = (w for w in caught if not issubclass(w.category, HIDDEN))
    return tuple(dict.fromkeys(" ".join(str(w.message).split()) for w in shown))
