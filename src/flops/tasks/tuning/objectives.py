"""Objectives of the command line: a Python function by its name, or any program.

A program gets a file with one row per line and prints one line of numbers per row:

    {"point": 3, "parameters": [0.1, -0.2]}         the file (jsonl)
    0.731                                           its answer: the loss, then any other columns

Both are picklable, so that processes and clusters can evaluate them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flops.blackbox.journal_records import Response
from flops.blackbox.objective import Candidates, ObjectiveError
from flops.errors import FlopsError
from flops.tasks.tuning.names import InputFormat
from flops.tasks.tuning.programs import PROGRAMS


@dataclass(frozen=True)
class FunctionObjective:
    """A function ``losses = function(parameters, points)`` of numpy arrays.

    Args:
        name: ``package.module:function``; the current folder is searched, too.
    """

    name: str

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Call the function; one that takes candidates and a key is called with these."""
        function = load(self.name)
        keyed = getattr(function, "evaluate", None)
        rows = candidates.parameters.numpy(), candidates.points.numpy()
        with PROGRAMS.evaluating():
            found = keyed(candidates, key) if callable(keyed) else function(*rows)
        if callable(keyed):
            return found if isinstance(found, Response) else Response(torch.as_tensor(found))
        values = np.asarray(found, dtype=np.float32)
        return Response(torch.from_numpy(np.ascontiguousarray(values)))


@functools.cache
def load(name: str) -> Callable[..., Any]:
    """Import an objective.

    Raises:
        FlopsError: Says what is missing.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise FlopsError(f"--objective must be package.module:function, not {name}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise FlopsError(
            f"--objective {name}: the module {module} cannot be imported from {here} ({error})"
        ) from error
    except AttributeError as error:
        raise FlopsError(f"--objective {name}: {error}") from error
    if isinstance(found, type):
        found = found()
    if not callable(found) and not callable(getattr(found, "evaluate", None)):
        raise FlopsError(f"--objective {name} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CommandObjective:
    """A program that reads a file of rows and prints their losses.

    The idempotency key of the rows is in the environment variable FLOPS_KEY.

    Args:
        command: With ``{input}`` for the file.
        timeout: Seconds before it is killed; None for no limit.
        form: Format of the file: "jsonl"; "csv" and "npy" have the point in the first column and
            the parameters in the others.
    """

    command: str
    timeout: float | None = None
    form: InputFormat = "jsonl"

    def __post_init__(self) -> None:
        """Check the command."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise FlopsError(f"--command cannot be split into words: {error}") from error
        if not any("{input}" in word for word in words):
            raise FlopsError(
                f"--command must contain {{input}}, the file of rows to evaluate: {self.command!r}"
            )

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Run the program.

        Raises:
            ObjectiveError: If it fails, or does not print one line of numbers per row.
            TimeoutError: If it takes too long.
        """
        with tempfile.TemporaryDirectory(prefix="flops-") as folder:
            path = Path(folder) / f"rows.{self.form}"
            write_rows(path, candidates, self.form)
            words = [w.replace("{input}", str(path)) for w in shlex.split(self.command)]
            with PROGRAMS.evaluating():
                said, errors, code = PROGRAMS.run(words, key, self.timeout)
        if code:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise ObjectiveError(f"{words[0]} exited with status {code}: {last}")
        return Response(read_losses(said, len(candidates), words[0]))


def write_rows(path: Path, candidates: Candidates, form: InputFormat) -> None:
    """Write rows to a file."""
    points, values = candidates.points.tolist(), candidates.parameters.numpy()
    if form == "npy":
        np.save(path, np.column_stack([points, values]).astype(np.float64))
        return
    rows = zip(points, values.tolist(), strict=True)
    if form == "csv":
        lines = [",".join(map(repr, [point, *row])) for point, row in rows]
    else:
        lines = [json.dumps({"point": point, "parameters": row}) for point, row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_losses(said: str, rows: int, program: str) -> torch.Tensor:
    """Losses and other columns that a program printed, one line per row.

    Numbers are separated by blanks or commas; brackets of a JSON list are ignored.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    if len(lines) != rows:
        raise ObjectiveError(
            f"{program} must print one line for each of the {rows} rows, but printed {len(lines)}"
        )
    found = []
    for line in lines:
        try:
            found.append([float(word) for word in line.strip(" \t[]").replace(",", " ").split()])
        except ValueError:
            raise ObjectiveError(
                f"{program} must print numbers, the loss first, but printed {line.strip()[:80]!r}"
            ) from None
    if len({len(numbers) for numbers in found}) != 1 or not found[0]:
        raise ObjectiveError(f"{program} must print as many numbers in each line")
    return torch.tensor(found)
