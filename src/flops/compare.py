"""Several methods on one task, at equal cost and at equal epochs.

One run of a method gives both: it goes on until the epochs are done *and* the budget of forward
equivalents is used up, and is measured at both marks. The budget is what the dearest forward
method takes for the epochs, so that every method has done them by then. Learning rate and sigma of
each method come from the same small sweep on the validation split, with a seed of its own; the test
split is looked at in the reported runs only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flops.errors import FlopsError, NonFiniteLossError
from flops.methods import MethodName
from flops.options import Config
from flops.progress import budget_mark, epoch_mark
from flops.studies.cells import Cell, Result, run_cells
from flops.trainer import Trainer
from flops.training import train

SWEEP_SEED = 1000  # of the sweep: not among those that are reported


@dataclass(frozen=True)
class Run:
    """One run of one method; the settings of a cell."""

    method: MethodName
    learning_rate: float
    sigma: float | None
    epochs: int
    budget: float
    model: str
    data: str
    queries: float
    batch: int
    test: bool
    limit: int | None = None
    seed: int = 0

    def config(self) -> Config:
        """The same as a training run that writes no folder."""
        return Config(
            model=self.model,
            data=self.data,
            limit=self.limit,
            method=self.method,
            queries=self.queries,
            sigma=None if self.sigma is None else (self.sigma,),
            epochs=self.epochs,
            budget=self.budget,
            until="last",
            batch=self.batch,
            learning_rate=self.learning_rate,
            seed=self.seed,
            evaluate_every=1,
            test=self.test,
        )


def measure(run: Run) -> Result:
    """Train, and return all evaluations and the two that are compared."""
    found = train(run.config())
    marks = {mark: e for e in found.evaluations for mark in e.marks}
    return {
        "at_epochs": marks[epoch_mark(run.epochs)].to_dict(),
        "at_budget": marks[budget_mark(run.budget)].to_dict(),
        "curve": [e.to_dict() for e in found.evaluations],
        "peak_memory": found.peak_memory,
    }


def try_out(run: Run) -> Result:
    """The same for a run of the sweep, where a setting that diverges is only a bad one."""
    try:
        return measure(run)
    except NonFiniteLossError:
        return {"at_budget": {"accuracy": 0.0}, "diverged": True}


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Attributes:
        methods: In the order of the tables.
        seeds: Reported seeds.
        epochs: At which table (b) compares.
        budget: Forward equivalents at which table (a) compares; None is what the dearest of the
            forward methods takes for the epochs.
        learning_rates: To choose from; a single one is not swept.
        sigmas: To choose from.
        sweep_epochs: Epochs of a run of the sweep.
        base: Model, data, queries, batch and limit.
        folder: Where results are kept, run by run.
        workers: Processes, of one thread each.
    """

    methods: tuple[MethodName, ...]
    seeds: int
    epochs: int
    budget: float | None
    learning_rates: tuple[float, ...]
    sigmas: tuple[float, ...]
    sweep_epochs: int
    base: Config
    folder: Path
    workers: int
    console: Console

    def run(self, method: MethodName, learning_rate: float, sigma: float, **changed: Any) -> Run:
        """A run of a method; backpropagation has no sigma."""
        base = self.base
        given = Run(
            method,
            learning_rate,
            None if method == "bp" else sigma,
            self.epochs,
            self.budget or 1.0,
            base.model,
            base.data,
            base.queries,
            base.batch,
            test=False,
            limit=base.limit,
        )
        return dataclasses.replace(given, **changed)


@dataclass(frozen=True)
class Chosen:
    """What the sweep chose for a method, and all that it saw."""

    learning_rate: float
    sigma: float
    tried: tuple[tuple[float, float, float], ...]  # learning rate, sigma, validation accuracy


def compare(plan: Plan) -> tuple[Plan, dict[MethodName, Chosen], dict[MethodName, list[Result]]]:
    """Sweep, then run every method with every seed; what is done already is read again.

    Returns:
        The plan with its budget, the chosen settings and the results of the seeds, by method.

    Raises:
        FlopsError: If there is nothing to compare, or a run failed.
    """
    if not plan.methods or len(set(plan.methods)) != len(plan.methods):
        raise FlopsError(f"give different methods to compare, not {list(plan.methods)}")
    for rate, sigma in itertools.product(plan.learning_rates, plan.sigmas):
        plan.run("lr", rate, sigma).config()  # refuses what is not allowed, before anything is run
    if plan.budget is None:
        forward = [m for m in plan.methods if m != "bp"] or plan.methods
        budget = float(round(max(cost_of_epochs(plan, method) for method in forward)))
        plan = dataclasses.replace(plan, budget=budget)
    chosen = {method: _sweep(plan, method) for method in plan.methods}
    cells = {
        method: [
            Cell("runs", measure, plan.run(method, c.learning_rate, c.sigma, seed=s, test=True))
            for s in range(plan.seeds)
        ]
        for method, c in chosen.items()
    }
    every = list(itertools.chain(*zip(*cells.values(), strict=True)))  # seed by seed
    run_cells(every, plan.folder, plan.workers, plan.console, "runs", fresh=True)
    results = {m: [r for c in mine if (r := c.load(plan.folder))] for m, mine in cells.items()}
    return plan, chosen, results


def cost_of_epochs(plan: Plan, method: MethodName) -> float:
    """Forward equivalents of the epochs, by taking two steps: a first one may cost more."""
    trainer = Trainer(plan.run(method, plan.learning_rates[0], plan.sigmas[-1]).config())
    trainer.step()
    before = trainer.progress.spent  # with looking at the structure, pruning
    points = trainer.points * plan.epochs - plan.base.batch
    trainer.step()
    assert trainer.progress.per_point is not None
    return 1.01 * (before + trainer.progress.per_point * max(0, points))


def _sweep(plan: Plan, method: MethodName) -> Chosen:
    """The best of all settings on the validation split, after a short run."""
    sigmas: Sequence[float] = plan.sigmas[-1:] if method == "bp" else plan.sigmas
    pairs = list(itertools.product(plan.learning_rates, sigmas))
    if len(pairs) == 1:
        return Chosen(*pairs[0], ())
    # As long, in proportion, as the reported runs: cheap methods take more epochs for a budget.
    share = (plan.budget or 1.0) * plan.sweep_epochs / plan.epochs
    cells = [
        Cell(
            "sweep",
            try_out,
            plan.run(method, rate, sigma, seed=SWEEP_SEED, epochs=plan.sweep_epochs, budget=share),
        )
        for rate, sigma in pairs
    ]
    found = run_cells(cells, plan.folder, plan.workers, plan.console, f"sweep {method}")
    scores = [float(one["at_budget"]["accuracy"]) for one in found]
    best = max(range(len(pairs)), key=lambda i: scores[i])
    tried = tuple((*pair, score) for pair, score in zip(pairs, scores, strict=True))
    return Chosen(*pairs[best], tried)
