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

from flops.errors import FlopsError
from flops.experiments.cells import Cell, Result, run_cells
from flops.experiments.plans import Plan, measure
from flops.experiments.sweep import Chosen, sweep
from flops.training.methods import MethodName
from flops.training.trainer import Trainer


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
    chosen = {method: sweep(plan, method) for method in plan.methods}
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
