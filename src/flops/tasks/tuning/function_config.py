"""Options of tuning an objective."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from flops.errors import FlopsError, check_least
from flops.tasks.tuning.config import CampaignConfig
from flops.tasks.tuning.names import FUNCTION_METHODS, InputFormat

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
        check_least(
            {"points": 1, "validation": 0, "test": 0, "retries": 0, "dimensions": 1}, config
        )
        if not 0 <= config.max_failures <= 1:
            raise FlopsError(f"--max-failures must be from 0 to 1, not {config.max_failures}")
        return config
