"""Cells: the independent runs of a study, each written when it is done, so a study can be resumed.

A cell is one setting with one seed. Its result goes to a JSON file of its own, at once and whole;
a cell whose file is there, with the same settings, is not run again. Delete the file, or take
another folder, to measure it again after the code has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flops.errors import FlopsError
from flops.optional import MissingPackageError
from flops.storage.disk import DiskError, reason
from flops.storage.files import atomic_write, safe_name
from flops.storage.plain import parse_object

Result = dict[str, Any]
LONGEST = 200  # bytes of a file's name


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        part: The part of the study that it belongs to; a folder.
        measure: A function at the top level of a module, from the settings to plain values.
        settings: A frozen dataclass, the seed among its fields.
    """

    part: str
    measure: Callable[[Any], Result]
    settings: Any

    @property
    def name(self) -> str:
        """The seed and the settings that are not left at their defaults."""
        given = [
            f"{f.name}={getattr(self.settings, f.name)}"
            for f in dataclasses.fields(self.settings)
            if f.name == "seed" or getattr(self.settings, f.name) != f.default
        ]
        return ",".join(given)

    def path(self, folder: Path) -> Path:
        """Where the result goes: in the folder of its part, whatever is in a setting."""
        name = safe_name(self.name)
        if name != self.name or len(os.fsencode(name)) > LONGEST:  # others may come out alike
            name = f"{name[: LONGEST // 4]}-{self._digest}"
        return folder / "cells" / self.part / f"{name}.json"

    @property
    def _digest(self) -> str:
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:16]

    def _places(self, folder: Path) -> list[Path]:
        """Where the result may be: older versions left `/` and `:` in names."""
        name, parts = self.name, Path(self.name).parts
        if ".." in parts or any(len(os.fsencode(part)) > LONGEST for part in parts):
            name = f"{self.name.replace('/', '_')[: LONGEST // 4]}-{self._digest}"
        return [self.path(folder), folder / "cells" / self.part / f"{name}.json"]

    def load(self, folder: Path) -> Result | None:
        """The result, if it is there and of the same settings."""
        return next((r for p in self._places(folder) if (r := self._read(p)) is not None), None)

    def forget(self, folder: Path) -> None:
        """Remove the result, so that the cell is run again."""
        for path in self._places(folder):
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Result | None:
        try:
            kept = parse_object(path.read_bytes())
        except (OSError, ValueError):  # absent or half, or a name that this system does not take
            return None
        defaults = {
            f.name: f.default
            for f in dataclasses.fields(self.settings)
            if f.default is not dataclasses.MISSING
        }  # of settings that are newer than the result
        now = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        settings, result = kept.get("settings"), kept.get("result")
        if not isinstance(settings, dict) or not isinstance(result, dict):  # nothing of ours
            return None
        return result if {**json.loads(json.dumps(defaults)), **settings} == now else None

    def save(self, folder: Path, result: Result) -> None:
        """Write the result beside its place and move it there, so that it is whole or absent."""
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"settings": dataclasses.asdict(self.settings), "result": result}
        atomic_write(path, json.dumps(kept, indent=1) + "\n")


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    workers: int,
    console: Console,
    title: str,
    fresh: bool = False,
) -> list[Result]:
    """Run the cells that are not done, and return the results of all, in order.

    Args:
        cells: What to run.
        folder: Where results are kept.
        workers: Processes, of one thread each; 0 runs in this one.
        console: Shows a bar if it is a terminal.
        title: In front of the bar.
        fresh: A process for each cell, so that its peak memory is its own.

    A result that cannot be written, as on a full disk, is kept in memory, and written as soon as
    that works again; a warning says so once.

    Raises:
        FlopsError: If cells failed. The others have been run and kept.
        DiskError: If results could not be written up to the end.
    """
    left = [cell for cell in cells if cell.load(folder) is None]
    failed: dict[str, BaseException] = {}
    unwritten: dict[Cell, Result] = {}
    said = ""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=len(cells), completed=len(cells) - len(left))
        for cell, error, result in _finished(left, folder, workers, fresh):
            if error is not None and result is not None:
                unwritten[cell] = result
                if not said:
                    said = (
                        f"cannot write to {folder}: {reason(error)}; the study goes on, and results"
                        " are written as soon as there is room"
                    )
                    warnings.warn(said, stacklevel=2)
            elif error is not None:
                failed[cell.name] = error
            _write_again(unwritten, folder)
            bar.advance(task)
    if unwritten:
        some = f"cannot write {len(unwritten)} of {len(left)} results to {folder}"
        advice = "make room, and run it again: these are measured again, the others are kept"
        raise DiskError(f"{some}: {said.partition(': ')[2].partition(';')[0]}; {advice}")
    if failed:
        name, error = next(iter(failed.items()))
        if isinstance(error, MissingPackageError):  # it says all that there is to say
            raise error
        raise FlopsError(
            f"{len(failed)} of {len(left)} cells of '{title}' failed, first '{name}': {error!r}; "
            "the others are kept, run again to continue"
        ) from error
    return [found for cell in cells if (found := cell.load(folder)) is not None]


def _write_again(unwritten: dict[Cell, Result], folder: Path) -> None:
    """Write what can be written by now."""
    for cell, result in list(unwritten.items()):
        try:
            cell.save(folder, result)
        except OSError:
            return
        del unwritten[cell]


def _finished(
    cells: Sequence[Cell], folder: Path, workers: int, fresh: bool
) -> Iterator[tuple[Cell, BaseException | None, Result | None]]:
    """Cells as they finish, each with its error or None, and the result if it is not written."""
    if workers == 0:
        for cell in cells:
            yield cell, *_attempt(cell, folder)
        return
    if not cells:
        return
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the processes import torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(cells)),
        context,
        _start_worker,
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        futures = {pool.submit(_attempt, cell, folder): cell for cell in cells}
        for future in as_completed(futures):
            failed = future.exception()  # the process itself died
            yield futures[future], *((failed, None) if failed is not None else future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _start_worker() -> None:
    """One thread of torch; it ends without a word at Ctrl-C, and if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _attempt(cell: Cell, folder: Path) -> tuple[Exception | None, Result | None]:
    try:
        result = cell.measure(cell.settings)
    except Exception as error:
        return error, None
    try:
        cell.save(folder, result)
    except OSError as error:  # what took hours to measure is not thrown away
        return error, result
    return None, None
