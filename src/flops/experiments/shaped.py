"""Study of shaped noise: cosines, accuracy, other problems and ablations.

- `main`: fine-tuning the bundled ViT with shaped noise, cosine of each third of the network; and
  the same from losses alone.
- `allocators`: the same with 8 queries and other allocators.
- `cost`: forward equivalents to come within a point of backpropagation, by queries.
- `defaults`: a new user's `ForwardGradient(model, loss_fn)` after five epochs.
- `problems`: shaped against isotropic noise on five other problems.
- `accuracy`: test accuracy against backpropagation after the same number of epochs.
- `grid`: cosine by target, queries and noise, and ablations.
- `text`: SmolLM2 on the sentences, all layers and the last twelve alone; after make real-models.

Every run is a cell (`flops.experiments.cells`): the study can be stopped and resumed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from rich.console import Console

from flops.errors import FlopsError, check_least
from flops.experiments.cells import Cell, Result, run_cells
from flops.experiments.shaped_problems import PROBLEMS, Comparison, compare
from flops.experiments.shaped_tables import (
    accuracy_sheet,
    allocators_sheet,
    best_rates,
    cost_sheet,
    defaults_sheet,
    grid_sheet,
    ingredients_sheet,
    main_sheet,
    problems_sheet,
    sweep_sheet,
)
from flops.experiments.shaped_text import START, TextRun, text_sheet, train_text
from flops.experiments.shaped_training import THIRDS, TrainingRun, train
from flops.report.plots import plot_over_steps
from flops.report.table import Sheet
from flops.storage.disk import MEASURED, writing
from flops.storage.files import atomic_write
from flops.training.device import find_device
from flops.training.methods import MethodName

Part = Literal["main", "allocators", "cost", "defaults", "problems", "accuracy", "grid", "text"]
PARTS: tuple[Part, ...] = tuple(p for p in get_args(Part) if p != "text")  # which needs a download
Key = TypeVar("Key")

RATES = (3e-4, 1e-3, 3e-3)
SWEEP_SEED = 100  # never among the reported seeds
MAIN = ((20, 5, 50), (8, 8, 50))
ALLOCATORS = {
    "Gaussian, standardised losses": "gaussian",
    "Gaussian, tanh of losses": "tanh",
    "Neyman": "neyman",
}
COST: dict[str, dict[str, Any]] = {
    "backpropagation": {"method": "backpropagation", "epochs": 6},
    "automatic": {"method": "default", "epochs": 12},
    "4 queries": {"method": "fixed", "queries": 4, "epochs": 12},
    "8 queries": {"method": "fixed", "queries": 8, "epochs": 10},
    "20 queries": {"method": "fixed", "queries": 20, "epochs": 8},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "backpropagation": {"method": "backpropagation"},
    "nothing set": {"method": "default"},
    "the paper's": {"method": "paper"},
}
LAYERS: dict[str, tuple[int, MethodName]] = {
    "all layers": (30, "shaped-lr"),
    "all layers, backpropagation": (30, "bp"),
    "last twelve layers": (12, "shaped-lr"),
}
QUERIES = (4, 8, 20, 60)
GRID_STEPS = 57  # three epochs of batches of 64
INGREDIENTS: dict[str, dict[str, Any]] = {
    "isotropic noise, averaged": {"method": "isotropic"},
    "isotropic noise, posterior mean": {"explore": 1.0},
    "isotropic, equal allocation": {"method": "isotropic", "allocator": "equal"},
    "shaped noise": {},
    "shaped, equal allocation": {"allocator": "equal"},
    "shaped, unbiased": {"unbiased": True},
    "shaped, a tenth isotropic": {"explore": 0.1},
    "shaped, a quarter isotropic": {"explore": 0.25},
    "shaped, half isotropic": {"explore": 0.5},
    "isotropic, batches of 8": {"method": "isotropic", "batch": 8, "most": GRID_STEPS},
    "shaped, batches of 8": {"batch": 8, "most": GRID_STEPS},
}


@dataclass(frozen=True)
class ShapedStudy:
    """Settings of the study.

    Attributes:
        folder: Folder of the results.
        seeds: Number of seeds of `main`, `problems` and `accuracy`.
        grid_seeds: Number of seeds of `grid`.
        workers: Processes.
        console: Shows progress bars and tables.
        most: Largest number of training steps per run, for quick runs; None for all.
        device: cpu, cuda, or auto.
        lengths: Queries, epochs and first step of the mean, for each row of `main`.
        rates: Learning rates of the sweep of `accuracy`.
        layers: Of `text`: layers that are trained, the last ones, and the method, by row.
        text: Further settings of `text`.
    """

    folder: Path
    seeds: int
    grid_seeds: int
    workers: int
    console: Console
    most: int | None = None
    device: str = "auto"
    lengths: tuple[tuple[int, int, int], ...] = MAIN
    rates: tuple[float, ...] = RATES
    layers: Mapping[str, tuple[int, MethodName]] = field(default_factory=lambda: LAYERS)
    text: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, part: str, measure: Callable[[Any], Result], rows: Mapping[Key, Any]
    ) -> dict[Key, list[Result]]:
        """Results of each row's settings, per seed; saved ones are loaded."""
        cells = {
            key: [Cell(part, measure, replace(s, device=self.device)) for s in chosen]
            for key, chosen in rows.items()
        }
        every = [cell for row in cells.values() for cell in row]
        found = iter(run_cells(every, self.folder, self.workers, self.console, part))
        return {key: [next(found) for _ in row] for key, row in cells.items()}


def _main(study: ShapedStudy) -> list[Sheet]:
    settings = {
        (queries, start if study.most is None else 0, outputs): [
            TrainingRun(queries=queries, epochs=epochs, outputs=outputs, most=study.most, seed=seed)
            for seed in range(study.seeds)
        ]
        for queries, epochs, start in study.lengths
        for outputs in (True, False)
    }
    found = study.run("main", train, settings)
    lines = {
        third: {
            f"{queries} queries{'' if outputs else ', losses alone'}": (
                results[0]["steps"],
                [[row[number] for row in r["cosines"]] for r in results],
            )
            for (queries, _, outputs), results in found.items()
        }
        for number, third in enumerate(THIRDS)
    }
    plot_over_steps(study.folder / "main.png", lines, "cosine to the exact gradient")
    return [main_sheet(found)]


def _allocators(study: ShapedStudy) -> list[Sheet]:
    queries, epochs, start = study.lengths[-1]
    settings = {
        name: [
            TrainingRun(queries=queries, epochs=epochs, allocator=kind, most=study.most, seed=seed)
            for seed in range(study.seeds)
        ]
        for name, kind in ALLOCATORS.items()
    }
    found = study.run("main", train, settings)  # whose cells are those of one allocator
    return [allocators_sheet(found, queries, start if study.most is None else 0)]


def _runs(study: ShapedStudy, rows: Mapping[str, Any], **common: Any) -> dict[str, list[Any]]:
    """Settings of each row, per seed."""
    common |= {"every": 0, "most": study.most}
    return {
        name: [TrainingRun(**{**common, **row}, seed=seed) for seed in range(study.seeds)]
        for name, row in rows.items()
    }


def _cost(study: ShapedStudy) -> list[Sheet]:
    return [cost_sheet(study.run("cost", train, _runs(study, COST, curve=True)))]


def _defaults(study: ShapedStudy) -> list[Sheet]:
    rows = _runs(study, DEFAULTS, epochs=5, frozen=False, test=True)
    return [defaults_sheet(study.run("defaults", train, rows))]


def _problems(study: ShapedStudy) -> list[Sheet]:
    steps = Comparison("").steps if study.most is None else study.most
    settings = {
        name: [Comparison(name, steps=steps, seed=seed) for seed in range(study.seeds)]
        for name in PROBLEMS
    }
    found = study.run("problems", compare, settings)
    panels = {
        name: {
            arm: (range(steps), [[statistics.fmean(row) for row in r[arm]] for r in results])
            for arm in ("shaped", "isotropic")
        }
        for name, results in found.items()
    }
    plot_over_steps(study.folder / "problems.png", panels, "cosine to the exact gradient")
    return [problems_sheet(found, 20 if study.most is None else 0)]


def _accuracy(study: ShapedStudy) -> list[Sheet]:
    common: dict[str, Any] = {"epochs": 8, "every": 0, "most": study.most}
    tried = {
        (method, rate): [TrainingRun(method, learning_rate=rate, seed=SWEEP_SEED, **common)]
        for method in ("shaped", "backpropagation")
        for rate in study.rates
    }
    sweep = study.run("sweep", train, tried)
    rates = best_rates(sweep)
    settings = {
        method: [
            TrainingRun(method, learning_rate=rate, test=True, seed=seed, **common)
            for seed in range(study.seeds)
        ]
        for method, rate in rates.items()
    }
    found = study.run("accuracy", train, settings)
    return [sweep_sheet(sweep), accuracy_sheet(found, rates)]


def _text(study: ShapedStudy) -> list[Sheet]:
    more: dict[str, Any] = dict(study.text)
    if study.most is not None:
        more["steps"] = study.most
    rows = {
        name: [TextRun(last, method, seed=seed, **more) for seed in range(study.seeds)]
        for name, (last, method) in study.layers.items()
    }
    found = study.run("text", train_text, rows)
    return [text_sheet(found, START if study.most is None else 0)]


def _grid(study: ShapedStudy) -> list[Sheet]:
    common: dict[str, Any] = {"epochs": 3, "follow": "exact"}
    start = 20 if study.most is None else 0

    def seeds(**chosen: Any) -> list[TrainingRun]:
        limit = {} if study.most is None else {"most": study.most}
        every = {**common, **chosen, **limit}
        return [TrainingRun(**every, seed=seed) for seed in range(study.grid_seeds)]

    ingredients = {
        (name, queries): seeds(queries=queries, **options)
        for name, options in INGREDIENTS.items()
        for queries in (8, 20)
    }
    grid = {
        (targets, noise, queries): seeds(targets=targets, method=noise, queries=queries)
        for targets in ("stage", "block", "leaf")  # the slowest last
        for noise in ("isotropic", "shaped")
        for queries in QUERIES
    }
    parts = study.run("grid", train, ingredients)
    return [
        ingredients_sheet(parts, start),
        grid_sheet(study.run("grid", train, grid), start),
    ]


_RUN: dict[Part, Callable[[ShapedStudy], list[Sheet]]] = {
    "main": _main,
    "allocators": _allocators,
    "cost": _cost,
    "defaults": _defaults,
    "problems": _problems,
    "accuracy": _accuracy,
    "grid": _grid,
    "text": _text,
}


def main(parts: Sequence[Part], study: ShapedStudy) -> None:
    """Run the parts; tables go to the console, to tables.md and, by part, to JSON.

    Raises:
        FlopsError: If there is nothing to run, or cells failed.
    """
    if not parts:
        raise FlopsError("need at least one of --parts")
    check_least({"seeds": 1, "grid_seeds": 1, "workers": 0, "most": 1}, study)
    find_device(study.device)  # early, not in every cell
    with writing(study.folder, "choose another --output"):
        study.folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        sheets = _RUN[part](study)
        kept = [{"title": s.title, "header": s.header, "rows": s.rows} for s in sheets]
        text = "\n".join(sheet.markdown() for sheet in sheets)
        with writing(study.folder, MEASURED):
            atomic_write(study.folder / f"{part}.json", json.dumps(kept, indent=1) + "\n")
            atomic_write(study.folder / f"{part}.md", text)
        for sheet in sheets:
            sheet.print(study.console)
    study.console.print(f"written to {study.folder}")
