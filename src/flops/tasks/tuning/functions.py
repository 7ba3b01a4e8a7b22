"""Any objective as a problem of `flops tune`: workers, results."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flops.blackbox.failures import OnFailure
from flops.blackbox.tuning import SplitIndices
from flops.errors import FlopsError
from flops.optional import require
from flops.storage.files import atomic_write
from flops.tasks.tuning.function_config import FunctionConfig
from flops.tasks.tuning.methods import Recipe
from flops.tasks.tuning.objectives import CommandObjective, FunctionObjective, load
from flops.tasks.tuning.problem import Job
from flops.tasks.tuning.programs import start_worker


@dataclass
class FunctionProblem:
    """A function or a program whose mean loss over points is minimised."""

    config: FunctionConfig
    title: str = "Black-box tuning"
    metric: Literal["accuracy", "loss"] = "loss"
    note: str = (
        "Mean loss over the test points of the parameters with the best validation loss. Queries: "
        "rows evaluated, validation and test included, without the runs that chose step sizes; "
        "failed: rows that were left out."
    )

    def __post_init__(self) -> None:
        """Load what is given, so that errors come early."""
        config = self.config
        self._start = read_start(config.start, config.dimensions)
        train, validation = config.points, config.validation
        splits = [torch.arange(train)]
        splits += [torch.arange(train, train + validation) if validation else splits[0]]
        first = train + validation
        splits += [torch.arange(first, first + config.test) if config.test else splits[1]]
        self._splits = SplitIndices(*splits)
        if config.objective is not None:
            load(config.objective)
        else:
            self._command()

    def open(self, stack: ExitStack, number: int) -> Executor | None:
        """The executor of a worker."""
        name, count = self.config.executor, self.config.concurrency or 1
        if name == "threads":
            return None
        if name == "processes":
            context = multiprocessing.get_context("spawn")
            return stack.enter_context(ProcessPoolExecutor(count, context, start_worker))
        if "://" not in name:
            raise FlopsError(
                f"--executor must be threads, processes or the address of a Dask scheduler, such "
                f"as tcp://127.0.0.1:8786, not {name}"
            )
        distributed = require("distributed", "cluster")
        try:
            client = stack.enter_context(distributed.Client(name, timeout=3))
        except (OSError, ValueError) as error:
            raise FlopsError(
                f"no Dask scheduler answers at {name}: start one with `dask scheduler`, or pass "
                "its address with --executor"
            ) from error
        found: Executor = client.get_executor()
        return found

    def job(self, recipe: Recipe, worker: Executor | None) -> Job:
        """The run of a recipe."""
        config = self.config
        objective: FunctionObjective | CommandObjective
        if config.objective is not None:
            objective = FunctionObjective(config.objective)
        else:
            objective = self._command()
        settings = {
            "objective": config.objective,
            "command": config.command,
            "input_format": config.input_format,
            "start": hashlib.sha256(self._start.numpy().tobytes()).hexdigest()[:16],
            "dimensions": len(self._start),
            "points": config.points,
            "validation": config.validation,
            "test": config.test,
            "part": config.part,
        }
        limit = None if config.command is not None else config.timeout

        def write(folder: Path, best: Tensor) -> None:
            atomic_write(folder / "parameters.json", json.dumps(best.tolist()) + "\n")
            np.save(folder / "parameters.npy", best.numpy())

        return Job(
            self._start,
            self._splits,
            objective,
            settings,
            write,
            part=config.part,
            concurrency=config.concurrency or 1,
            executor=worker,
            on_failure=OnFailure(config.retries, limit, config.max_failures),
        )

    def _command(self) -> CommandObjective:
        assert self.config.command is not None
        return CommandObjective(self.config.command, self.config.timeout, self.config.input_format)


def read_start(given: str | None, dimensions: int | None) -> Tensor:
    """Parameters to start from.

    Raises:
        FlopsError: If they are not a vector of finite numbers.
    """
    if given is None:
        if dimensions is None:
            raise FlopsError(
                "give the parameters to start from: --start 0.1,0.2,0.3, --start start.npy, or "
                "--dimensions N for N zeros"
            )
        return torch.zeros(dimensions)
    path = Path(given)
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            values = np.array(json.loads(path.read_text("utf-8")), dtype=np.float64)
        elif path.suffix in (".csv", ".txt"):
            words = path.read_text("utf-8").replace(",", " ").split()
            values = np.array([float(word) for word in words])
        else:
            values = np.array([float(word) for word in given.replace(",", " ").split()])
    except (OSError, ValueError, TypeError) as error:
        raise FlopsError(
            f"--start {given} is neither numbers separated by commas nor a readable .npy, .json, "
            f".csv or .txt file ({error})"
        ) from error
    values = np.asarray(values, dtype=np.float32).reshape(-1)
    if not len(values) or not np.isfinite(values).all():
        raise FlopsError(f"--start {given} must have one finite number or more")
    if dimensions is not None and dimensions != len(values):
        raise FlopsError(f"--start has {len(values)} numbers, but --dimensions is {dimensions}")
    return torch.from_numpy(values.copy())
