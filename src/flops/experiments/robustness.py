"""Study of robustness: the paper's table of natural and adversarial noise.

Every model, from a run directory or trained here, is evaluated on the whole test set: clean, under
Gaussian, uniform and Poisson noise, and under white-box FGSM, I-FGSM and MI-FGSM. Each training and
each trial is a cell (`flops.experiments.cells`): the study can be stopped and resumed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from flops.experiments.cells import Cell, run_cells
from flops.experiments.robustness_plots import plot_bounds
from flops.experiments.robustness_runs import FinishedRun, check_alike
from flops.experiments.robustness_tables import (
    BASE,
    Found,
    accuracy_sheet,
    bounds_sheet,
    differences_sheets,
    relative_sheet,
    write_csv,
)
from flops.experiments.robustness_trials import Strengths, measure
from flops.report.html import shown_value
from flops.report.table import Sheet
from flops.storage.disk import MEASURED, writing
from flops.storage.files import atomic_write
from flops.tasks.classification.config import FinetuneConfig


@dataclass(frozen=True)
class RobustnessStudy:
    """Settings of the study.

    Attributes:
        folder: Folder of the results.
        strengths: Strengths of the noise.
        limit: Largest number of test points; None for all.
        workers: Processes.
        console: Shows progress bars and tables.
    """

    folder: Path
    strengths: Strengths
    limit: int | None
    workers: int
    console: Console


def measure_all(runs: Sequence[FinishedRun], study: RobustnessStudy) -> Found:
    """All trials of all models; saved ones are loaded.

    Raises:
        FlopsError: If the runs do not fit together, or a trial failed.
    """
    cells = trial_cells(runs, study)
    results = run_cells(cells, study.folder, study.workers, study.console, "noise and attacks")
    rows = [(cell.settings, result) for cell, result in zip(cells, results, strict=True)]
    return Found(Path(runs[0].config.data).name, rows)


def trial_cells(runs: Sequence[FinishedRun], study: RobustnessStudy) -> list[Cell]:
    """Every trial of every run: methods as they were given, their seeds in order.

    Raises:
        FlopsError: If the runs do not fit together.
    """
    check_alike(runs)
    order = list(dict.fromkeys(run.method for run in runs))
    ordered = sorted(runs, key=lambda run: (order.index(run.method), run.seed))
    return [
        Cell("trials", partial(measure, run=run), trial)
        for run in ordered
        for trial in study.strengths.trials(run, study.limit)
    ]


def caption(found: Found, runs: Sequence[FinishedRun], strengths: Strengths) -> str:
    """Strengths, preprocessing, and training of the models."""
    s, points = strengths, found.rows[0][1]["points"]
    note = (
        f"{points} test images; {_seeds(found)}. Noise is added to pixels in [0, 1], cropped and "
        "resized for the model, before its normalisation; results are clipped to [0, 1] "
        f"and not rounded. Gaussian: standard deviation {s.gaussian:g}; uniform: "
        f"±{s.uniform:g}; Poisson: counts, {s.poisson:g} for white, so a variance of pixel/"
        f"{s.poisson:g}; the same draws for all models (the paper does not give its strengths). "
        f"Attacks: each model's exact gradient, at most {s.bound:g}/255 per pixel; I-FGSM and "
        f"MI-FGSM {s.steps} steps of 1/{s.steps} of that, momentum 1."
    )
    trained = {str(run.method): run.config for run in runs}  # equal except for their seeds
    said = "; ".join(_trained(trained[method]) for method in found.methods)
    note += f" Model {Path(runs[0].config.model).name}; {said}."
    if stuck := [f"{m} {found.unmoved(m):.2%}" for m in found.methods if found.unmoved(m)]:
        note += " Attacks without effect because the gradient is 0 in float32, which is not "
        note += f"robustness: {', '.join(stuck)}."
    return note


def _seeds(found: Found) -> str:
    counts = {m: len(found.accuracy(m, "clean", 0.0)) for m in found.methods}
    if set(counts.values()) == {1}:
        return "1 seed"
    same = len(set(counts.values())) == 1
    every = ", ".join(f"{method} {count}" for method, count in counts.items())
    said = f"{counts[found.methods[0]]} seeds" if same else f"seeds ({every})"
    return f"mean ± standard deviation over {said}"


def _trained(config: FinetuneConfig) -> str:
    said = f"{config.method} learning rate {config.learning_rate:g}"
    if config.sigma and config.method != BASE:
        said += f", sigma {' '.join(f'{value:g}' for value in config.sigma)}"
    if config.method != BASE:
        said += f", {shown_value(config.queries)} queries"
    if config.epochs is not None:
        said += f", {config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    return said if config.budget is None else f"{said}, {config.budget:g} forward equivalents"


def main(runs: Sequence[FinishedRun], study: RobustnessStudy) -> Found:
    """Run the study; tables go to the console and tables.md, results to JSON, CSV and a plot.

    Raises:
        FlopsError: If the runs do not fit together, or a trial failed.
    """
    found, strengths, console = measure_all(runs, study), study.strengths, study.console
    differences, by_bound = differences_sheets(found, strengths), bounds_sheet(found, strengths)
    sheets: list[Sheet] = [
        accuracy_sheet(found, strengths, caption(found, runs, strengths)),
        relative_sheet(found, strengths),
        *differences,
        *([] if by_bound is None else [by_bound]),
    ]
    text = "\n".join(sheet.markdown() for sheet in sheets)
    kept = {
        "strengths": dataclasses.asdict(strengths),
        "models": [{"digest": run.digest, **run.config.to_dict(), "output": None} for run in runs],
        "trials": [{**dataclasses.asdict(trial), **result} for trial, result in found.rows],
        "tables": [dataclasses.asdict(sheet) for sheet in sheets],
    }
    with writing(study.folder, MEASURED):
        atomic_write(study.folder / "tables.md", text)
        atomic_write(study.folder / "results.json", json.dumps(kept, indent=1) + "\n")
        write_csv(study.folder / "results.csv", found)
    for sheet in sheets:
        sheet.print(console)
    if not differences:
        console.print(f"no differences: they need runs of {BASE} and of another method")
    if len(strengths.all_bounds) > 1:
        try:
            with writing(study.folder, MEASURED):
                plot_bounds(study.folder / "bounds.png", found, strengths)
        except ImportError as error:
            console.print(f"no plot was drawn: {error}", markup=False)
    console.print(f"results are in {study.folder}", markup=False, soft_wrap=True)
    return found
