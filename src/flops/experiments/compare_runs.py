"""Settings of a comparison, and one run of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flops.errors import FlopsError, NonFiniteLossError
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.cells import Result
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.vit import Head
from flops.tasks.models.weights import weights_digest
from flops.training.loop import train
from flops.training.methods import WITHOUT_SIGMA, MethodName
from flops.training.progress import budget_mark, epoch_mark


@dataclass(frozen=True)
class ComparisonRun:
    """One run of one method; the settings of a cell."""

    method: MethodName
    learning_rate: float
    sigma: float | None
    epochs: int
    budget: float | None
    model: str
    data: str
    queries: float
    batch: int
    test: bool
    limit: int | None = None
    seed: int = 0
    targets: Targets | None = None
    head: Head = "fresh"
    weights: str = ""  # digest of a model folder

    def config(self) -> FinetuneConfig:
        """Configuration of a training run without a run directory."""
        return FinetuneConfig(
            model=self.model,
            head=self.head,
            data=self.data,
            limit=self.limit,
            method=self.method,
            queries=self.queries,
            sigma=None if self.sigma is None else (self.sigma,),
            targets=self.targets if "lr" in self.method else None,
            epochs=self.epochs,
            budget=self.budget,
            until="last",
            batch=self.batch,
            learning_rate=self.learning_rate,
            seed=self.seed,
            evaluate_every=1,
            test=self.test,
        )


def measure(run: ComparisonRun) -> Result:
    """Train; return all evaluations and the two that are compared."""
    found = train(run.config())
    marks = {mark: e for e in found.evaluations for mark in e.marks}
    result: Result = {"at_epochs": marks[epoch_mark(run.epochs)].to_dict()}
    if run.budget is not None:
        result["at_budget"] = marks[budget_mark(run.budget)].to_dict()
    curve = [e.to_dict() for e in found.evaluations]
    return {**result, "curve": curve, "peak_memory": found.peak_memory}


def measure_sweep_run(run: ComparisonRun) -> Result:
    """As `measure`, for a run of the sweep, which may diverge."""
    try:
        return measure(run)
    except NonFiniteLossError:
        return {"diverged": True}


def _weights(model: str) -> str:
    try:
        return weights_digest(model)
    except OSError as error:
        raise FlopsError(f"cannot read {error.filename}: {error.strerror}") from error


@dataclass(frozen=True)
class MethodComparison:
    """Settings of a comparison.

    Attributes:
        methods: Methods, in the order of the tables.
        seeds: Number of reported seeds.
        epochs: Epochs of table (b).
        budget: Forward equivalents of table (a); None for the cost of the epochs with the most
            expensive forward method.
        learning_rates: Candidates of the sweep; a single one is not swept.
        sigmas: Candidates of the sweep.
        sweep_epochs: Epochs of a run of the sweep.
        base: Model, head, data, queries, batch, limit and targets.
        folder: Folder of the results.
        workers: Processes, with one thread each.
    """

    methods: tuple[MethodName, ...]
    seeds: int
    epochs: int
    budget: float | None
    learning_rates: tuple[float, ...]
    sigmas: tuple[float, ...]
    sweep_epochs: int
    base: FinetuneConfig
    folder: Path
    workers: int
    console: Console

    def run(
        self, method: MethodName, learning_rate: float, sigma: float, **changed: Any
    ) -> ComparisonRun:
        """A run of a method; backpropagation has no sigma."""
        base = self.base
        given = ComparisonRun(
            method,
            learning_rate,
            None if method in WITHOUT_SIGMA else sigma,
            self.epochs,
            self.budget or 1.0,
            base.model,
            base.data,
            base.queries,
            base.batch,
            test=False,
            limit=base.limit,
            targets=base.targets,
            head=base.head,
            weights=_weights(base.model),
        )
        return dataclasses.replace(given, **changed)
