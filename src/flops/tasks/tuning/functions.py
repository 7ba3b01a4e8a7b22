"""Any objective as a problem of `flops tune`: options, workers, results."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flops.blackbox.failures import OnFailure
from flops.blackbox.tuning import SplitIndices
from flops.errors import FlopsError
from flops.optional import require
from flops.storage.files import atomic_write
from flops.tasks.tuning.config import CampaignConfig
from flops.tasks.tuning.methods import Recipe
from flops.tasks.tuning.names import FUNCTION_METHODS
from flops.tasks.tuning.objectives import CommandObjective, FunctionObjective, InputFormat, load
from flops.tasks.tuning.problem import Job

EPOCHS, UNLIMITED = 100, 10**9  # without and with a budget


@dataclass(frozen=True)
class FunctionOptions:
    """What to tune, if it is not prompts."""

    objective: str | None = None
    """Tune a function instead of prompts: package.module:function, called with numpy arrays of
    parameters (rows, d) and points (rows,); returns one loss per row."""
    command: str | None = None
    """Tune a program instead of prompts: 'prog {input}' reads a file with one row per line,
    {"point": 3, "parameters": [..]}, and prints one loss per line."""
    input_format: InputFormat = "jsonl"
    """Format of that file; csv and npy have the point in the first column."""
    start: str | None = None
    """Parameters to start from: numbers separated by commas, or a .npy, .json, .csv or .txt file.
    None for as many zeros as --dimensions."""
    points: int = 1
    """Points to train on: rows refer to them as 0, ..., points - 1. One for a value of a whole
    data set."""
    validation: int = 0
    """Points to validate on, numbered after those; 0 for the training points."""
    test: int = 0
    """Points to test on, numbered after those; 0 for the validation points."""
    executor: str = "threads"
    """Who evaluates: threads of this process, processes, or the address of a Dask scheduler
    (tcp://host:8786); --concurrency calls at a time."""
    retries: int = 2
    """Further attempts of a row that fails (an error, no finite loss, --timeout), before it is left
    out."""
    max_failures: float = 0.5
    """Largest share of the latest rows that may fail before a run stops."""


@dataclass(frozen=True)
class FunctionConfig(CampaignConfig, FunctionOptions):
    """All options of tuning an objective."""

    dimensions: int | None = None

    @classmethod
    def of(cls, given: Any) -> FunctionConfig:
        """The options of a command, with the defaults of an objective.

        Raises:
            FlopsError: Names the option to change.
        """
        config = cls(**{f.name: getattr(given, f.name) for f in fields(cls)})
        if (config.objective is None) == (config.command is None):
            raise FlopsError("give either --objective or --command, not both")
        epochs = EPOCHS if config.budget is None else UNLIMITED
        filled: dict[str, Any] = {
            "methods": ("start", "lr"),
            "sigma": 0.01,
            "queries": 20.0,
            "epochs": epochs,
        }
        here = config.objective is not None and config.executor == "threads"
        filled["concurrency"] = 1 if here else 4
        missing = {n: v for n, v in filled.items() if getattr(config, n) is None}
        config = replace(config, **missing)
        config.check(FUNCTION_METHODS)
        config.at_least({"points": 1, "validation": 0, "test": 0, "retries": 0, "dimensions": 1})
        if not 0 <= config.max_failures <= 1:
            raise FlopsError(f"--max-failures must be from 0 to 1, not {config.max_failures}")
        return config


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
            return stack.enter_context(ProcessPoolExecutor(count, context))
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
