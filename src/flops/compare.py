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
from flops.estimators.likelihood_ratio import Targets
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
    budget: float | None
    model: str
    data: str
    queries: float
    batch: int
    test: bool
    limit: int | None = None
    seed: int = 0
    targets: Targets | None = None

    def config(self) -> Config:
        """The same as a training run that writes no folder."""
        return Config(
            model=self.model,
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


def measure(run: Run) -> Result:
    """Train, and return all evaluations and the two that are compared."""
    found = train(run.config())
    marks = {mark: e for e in found.evaluations for mark in e.marks}
    result: Result = {"at_epochs": marks[epoch_mark(run.epochs)].to_dict()}
    if run.budget is not None:
        result["at_budget"] = marks[budget_mark(run.budget)].to_dict()
    curve = [e.to_dict() for e in found.evaluations]
    return {**result, "curve": curve, "peak_memory": found.peak_memory}


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
        base: Model, data, queries, batch, limit and targets.
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
            targets=base.targets,
        )
        return dataclasses.replace(given, **changed)


@dataclass(frozen=True)
class Chosen:
    """What the sweep chose for a method, and all that it saw.

    Attributes:
        learning_rate: The best at equal cost; and `sigma`.
        epochs_rate: The best at equal epochs; and `epochs_sigma`. A method that takes many more
            steps for the budget wants another rate there.
        tried: Learning rate, sigma, and the validation accuracy at equal cost and equal epochs.
    """

    learning_rate: float
    sigma: float
    epochs_rate: float
    epochs_sigma: float
    tried: tuple[tuple[float, float, float, float], ...] = ()


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
    cells = {method: _cells(plan, method, c) for method, c in chosen.items()}
    by_seed = zip(*cells.values(), strict=True)
    every = [c for methods in by_seed for pair in methods for c in dict.fromkeys(pair)]
    run_cells(every, plan.folder, plan.workers, plan.console, "runs", fresh=True)
    results = {method: [_both(plan, *pair) for pair in mine] for method, mine in cells.items()}
    return plan, chosen, results


def _cells(plan: Plan, method: MethodName, chosen: Chosen) -> list[tuple[Cell, Cell]]:
    """For every seed the run for equal cost and the one for equal epochs; often they are one."""
    found = []
    for seed in range(plan.seeds):
        cost = plan.run(method, chosen.learning_rate, chosen.sigma, seed=seed, test=True)
        epochs = plan.run(method, chosen.epochs_rate, chosen.epochs_sigma, seed=seed, test=True)
        if epochs != cost:
            epochs = dataclasses.replace(epochs, budget=None)  # ends with the epochs
        found.append((Cell("runs", measure, cost), Cell("runs", measure, epochs)))
    return found


def _both(plan: Plan, cost: Cell, epochs: Cell) -> Result:
    """One result: each table has the run that was tuned for it."""
    found, other = cost.load(plan.folder), epochs.load(plan.folder)
    assert found is not None
    assert other is not None
    return {**found, "at_epochs": other["at_epochs"]}


def cost_of_epochs(plan: Plan, method: MethodName) -> float:
    """Forward equivalents of the epochs, by taking two steps: a first one may cost more."""
    still = 1e-9  # a learning rate with which nothing diverges
    trainer = Trainer(plan.run(method, still, plan.sigmas[-1]).config())
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
        return Chosen(*pairs[0], *pairs[0])
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
    cost, epochs = (
        [float(one.get(mark, {}).get("accuracy", 0.0)) for one in found]
        for mark in ("at_budget", "at_epochs")
    )
    whole = ["diverged" not in one for one in found]
    best = [
        max(range(len(pairs)), key=lambda i: (whole[i], first[i], second[i]))
        for first, second in ((cost, epochs), (epochs, cost))
    ]
    tried = tuple((*pairs[i], cost[i], epochs[i]) for i in range(len(pairs)))
    return Chosen(*pairs[best[0]], *pairs[best[1]], tried)
