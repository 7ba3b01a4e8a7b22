"""Training of models for the study of robustness: runs of `flops finetune` in its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console

from flops.errors import FlopsError
from flops.experiments.cells import Cell, Result, run_cells
from flops.experiments.robustness_runs import LAST, FinishedRun, read_run
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.weights import weights_digest
from flops.training.loop import train
from flops.training.methods import METHODS, WITHOUT_SIGMA, MethodName
from flops.training.run_directory import is_run

# Chosen by the sweep of `flops compare` on the validation split, at equal epochs.
RATES: dict[MethodName, float] = {"bp": 1e-3, "ops-lr": 1e-3, "ops-spsa": 3e-3, "shaped-lr": 1e-3}
DEFAULT_METHODS: tuple[MethodName, ...] = ("bp", "ops-lr", "ops-spsa", "shaped-lr")
SIGMAS: dict[MethodName, float] = {"ops-lr": 1e-2, "ops-spsa": 1e-3, "shaped-lr": 1e-3}


@dataclass(frozen=True)
class ModelTraining:
    """One model to train; the settings of a cell."""

    method: MethodName
    learning_rate: float
    sigma: float | None
    epochs: int
    model: str
    data: str
    queries: float
    batch: int
    limit: int | None = None
    seed: int = 0
    weights: str = ""  # digest of a model folder
    device: str = "auto"

    def place(self, folder: Path) -> Path:
        """Its run directory inside the folder of the study, named by all its settings."""
        kept = dataclasses.asdict(self)
        if self.device == "auto":  # older versions had no other
            del kept["device"]
        text = json.dumps(kept, sort_keys=True)
        mark = hashlib.sha256(text.encode()).hexdigest()[:8]
        return folder / "models" / f"{self.method}-seed{self.seed}-{mark}"

    def config(self, folder: Path) -> FinetuneConfig:
        """Configuration of `flops finetune`."""
        return FinetuneConfig(
            model=self.model,
            data=self.data,
            limit=self.limit,
            method=self.method,
            queries=self.queries,
            sigma=None if self.sigma is None else (self.sigma,),
            epochs=self.epochs,
            batch=self.batch,
            learning_rate=self.learning_rate,
            seed=self.seed,
            device=self.device,
            output=str(self.place(folder)),
        )


def chosen(given: Sequence[str], what: str, known: dict[MethodName, float]) -> dict[str, float]:
    """Values by method: the known ones, overridden by those given as METHOD=VALUE.

    Raises:
        FlopsError: If one is not of this form.
    """
    values = {str(name): value for name, value in known.items()}
    for one in given:
        method, equals, text = one.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not equals or method not in METHODS or not 0 < value < float("inf"):
            raise FlopsError(
                f"--{what} are given as METHOD=VALUE with a value greater than 0, such as "
                f"ops-lr=1e-3, not '{one}'; methods are {', '.join(get_args(MethodName))}"
            )
        values[method] = value
    return values


def setting(method: MethodName, what: str, values: Mapping[str, float]) -> float:
    """The value of a method.

    Raises:
        FlopsError: If there is none.
    """
    if method not in values:
        raise FlopsError(f"no default for {method}: pass --{what} {method}=VALUE")
    return values[method]


def plan_trainings(
    methods: Sequence[MethodName],
    seeds: int,
    *,
    learning_rates: Sequence[str] = (),
    sigmas: Sequence[str] = (),
    epochs: int,
    model: str,
    data: str,
    queries: float,
    batch: int,
    limit: int | None,
    device: str = "auto",
) -> list[ModelTraining]:
    """Models to train: every method with every seed.

    Args:
        methods: Methods; duplicates are ignored.
        seeds: Number of seeds per method.
        learning_rates: As METHOD=VALUE, instead of the defaults from the sweep.
        sigmas: The same for noise scales.
        epochs: Epochs of each training.
        model: As for `flops finetune`.
        data: As for `flops finetune`.
        queries: Mean queries per point and group.
        batch: Batch size.
        limit: Largest number of points per split; None for all.
        device: Where they are trained and evaluated.

    Raises:
        FlopsError: If there are no methods, or a value is missing or invalid.
    """
    if not methods:
        raise FlopsError("pass at least one of --methods, or --runs FOLDER...")
    rates, scales = (
        chosen(learning_rates, "learning-rates", RATES),
        chosen(sigmas, "sigmas", SIGMAS),
    )
    return [
        ModelTraining(
            method,
            setting(method, "learning-rates", rates),
            None if method in WITHOUT_SIGMA else setting(method, "sigmas", scales),
            epochs,
            model,
            data,
            queries,
            batch,
            limit,
            seed,
            weights_digest(model),
            device,
        )
        for seed in range(seeds)
        for method in dict.fromkeys(methods)
    ]


def train_model(settings: ModelTraining, folder: Path) -> Result:
    """Train, or resume, in the run directory; return the last evaluation."""
    config = settings.config(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no plots were drawn")  # the study warns once
        found = train(config, resume=is_run(settings.place(folder)))
    last = found.evaluations[-1]
    return {"validation": last.accuracy, "seconds": found.seconds}


def train_models(
    trainings: Sequence[ModelTraining], folder: Path, workers: int, console: Console
) -> list[FinishedRun]:
    """The models, trained if missing.

    Raises:
        FlopsError: If training failed.
    """
    for training in trainings:
        training.config(folder)  # raises for invalid values before anything is run
    cells = [Cell("training", partial(train_model, folder=folder), t) for t in trainings]
    for cell in cells:  # a deleted model is trained again
        if not (cell.settings.place(folder) / "model" / LAST).is_file():
            cell.forget(folder)
    run_cells(cells, folder, workers, console, "training")
    return [read_run(training.place(folder)) for training in trainings]
