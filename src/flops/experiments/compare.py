"""Comparison of methods on one task, at equal cost and at equal epochs, or steps for texts.

One run of a method gives both: it continues until the epochs are complete *and* the budget of
forward equivalents is used up, and is evaluated at both marks. The budget is the cost of the epochs
for the most expensive forward method, so that every method completes them. Learning rate and sigma
of each method come from the same small sweep on the validation split, with a separate seed; the
test split is evaluated in the reported runs only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

from flops.errors import FlopsError
from flops.experiments.cells import Cell, Result, run_cells
from flops.experiments.compare_curves import Panel, plot
from flops.experiments.compare_methods import variant
from flops.experiments.compare_report import ComparisonResults
from flops.experiments.compare_runs import MethodComparison, describe, measure
from flops.experiments.compare_sweep import Chosen, run_sweeps, settings_of, sweep
from flops.storage.disk import MEASURED, writing
from flops.storage.files import atomic_write
from flops.training.trainer import Trainer


def main(study: MethodComparison) -> None:
    """Compare, print the tables, and write them with the results and a plot.

    Raises:
        FlopsError: If there is nothing to compare, a run failed, or results cannot be written.
    """
    folder, console = study.folder, study.console
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # early, not after hours
        raise FlopsError(f"cannot write to {folder}: {error.strerror}") from error
    study, chosen, results = compare(study)
    found = ComparisonResults.of(study, chosen, results)
    sheets, seen = found.sheets(), found.sentence()
    with writing(folder, MEASURED):
        written = [sheet.markdown() for sheet in sheets]
        atomic_write(folder / "tables.md", "\n".join([*written, seen + "\n"]))
        atomic_write(folder / "results.json", json.dumps(found.to_dict(), indent=1) + "\n")
        atomic_write(folder / "report.html", found.page(), durable=False)
    for sheet in sheets:
        sheet.print(console)
    console.print(seen)
    try:
        with writing(folder, MEASURED):
            title = f"{found.title}: accuracy against cost"
            plot(folder / "accuracy.png", Panel(title, results, found.chance))
        console.print(f"plot: {folder / 'accuracy.png'}", markup=False, soft_wrap=True)
    except ImportError as error:
        console.print(f"no plot was drawn: {error}", markup=False)
    console.print(f"page: {folder / 'report.html'}", markup=False, soft_wrap=True)
    console.print(f"results are in {folder}", markup=False, soft_wrap=True)


def compare(
    study: MethodComparison,
) -> tuple[MethodComparison, dict[str, Chosen], dict[str, list[Result]]]:
    """Sweep, then run every method with every seed; completed runs are loaded.

    Returns:
        The study with its budget, the chosen settings and the results of the seeds, by method.

    Raises:
        FlopsError: If there is nothing to compare, or a run failed.
    """
    if not study.methods or len(set(study.methods)) != len(study.methods):
        raise FlopsError(f"need different methods to compare, not {list(study.methods)}")
    kinds = {method: variant(method) for method in study.methods}
    for rate, sigma in itertools.product(study.learning_rates, study.sigmas):
        for method in study.methods:  # raises for invalid values before anything is run
            study.run(method, rate, sigma).config()
    if study.budget is None:
        trained = [m for m in study.methods if kinds[m].name is not None]
        forward = [m for m in trained if kinds[m].forward] or trained
        study.console.print(
            f"measuring two steps of {_counted(len(forward), 'method')}, for the budget"
        )
        costs = [cost_of_length(study, method) for method in forward]
        budget = float(round(max(costs, default=1.0)))
        study = dataclasses.replace(study, budget=budget)
    study.console.print(plan(study), markup=False, highlight=False, soft_wrap=True)
    run_sweeps(study)
    chosen = {method: sweep(study, method) for method in study.methods}
    cells = {method: _cells(study, method, c) for method, c in chosen.items()}
    by_seed = zip(*cells.values(), strict=True)
    every = [c for methods in by_seed for pair in methods for c in dict.fromkeys(pair)]
    run_cells(
        every,
        study.folder,
        study.workers,
        study.console,
        "reported runs",
        fresh=True,
        describe=describe,
    )
    results = {method: [_both(study, *pair) for pair in mine] for method, mine in cells.items()}
    return study, chosen, results


def plan(study: MethodComparison) -> str:
    """The number of runs, and what they cost; their time is known from those that finish."""
    tried = [len(settings_of(study, method)) for method in study.methods]
    short, swept = sum(n for n in tried if n > 1), sum(n > 1 for n in tried)
    methods, seeds = _counted(len(study.methods), "method"), _counted(study.seeds, "seed")
    said = f"plan: {methods} with {seeds}"
    if swept:
        said += f"; {short} short runs and at most {4 * swept} full ones choose their settings"
    said += f"; a reported run costs about {study.budget or 0:,.0f} forward equivalents"
    return said


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _cells(study: MethodComparison, method: str, chosen: Chosen) -> list[tuple[Cell, Cell]]:
    """For every seed the runs for equal cost and equal epochs, often the same."""
    found = []
    for seed in range(study.seeds):
        cost = study.reported(method, chosen.learning_rate, chosen.sigma, seed)
        epochs = study.reported(method, chosen.epochs_rate, chosen.epochs_sigma, seed)
        if epochs != cost:
            epochs = dataclasses.replace(epochs, budget=None)  # stops after the epochs
        found.append((Cell("runs", measure, cost), Cell("runs", measure, epochs)))
    return found


def _both(study: MethodComparison, cost: Cell, epochs: Cell) -> Result:
    """Merge both runs: each table uses the run that was tuned for it."""
    found, other = cost.load(study.folder), epochs.load(study.folder)
    assert found is not None
    assert other is not None
    return {**found, study.at_length: other[study.at_length]}


def cost_of_length(study: MethodComparison, method: str) -> float:
    """Forward equivalents of the epochs or steps, from two steps, of which the first may cost more.

    One percent is added.
    """
    still = 1e-9  # a learning rate too small to diverge
    trainer = Trainer(study.run(method, still, study.sigmas[-1]).config())
    sizes = [len(batch) for batch in trainer.batches]  # of every epoch
    steps = study.length * (len(sizes) if study.unit == "epochs" else 1)
    points = sum(sizes[step % len(sizes)] for step in range(1, steps))
    trainer.step()
    before = trainer.progress.spent  # includes tracing and pruning
    trainer.step()
    assert trainer.progress.per_point is not None
    return 1.01 * (before + trainer.progress.per_point * points)
