"""Study of gradients: cosine of estimates to the exact gradient, by budget, allocator and matrix.

- `matrices`: the paper's ablation; cosine of the Key and the first feed-forward matrix of the
  first, middle and last layer by query budget and allocator.
- `kernel`: the Gaussian allocator with its kernel and with a diagonal covariance.
- `targets`: leaf, block and stage targets, isotropic and shaped noise.
- `baselines`: the clean loss, antithetic pairs, none.

At several stages of training, from the same start models, which are trained once and saved. Every
panel and every row is a cell (`flops.experiments.cells`): the study can be stopped and resumed.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from rich.console import Console

from flops.errors import FlopsError
from flops.experiments.cells import Cell, Result, run_cells
from flops.experiments.gradients_ablations import (
    ABLATIONS,
    ablation_bars,
    ablation_records,
    ablation_sheet,
)
from flops.experiments.gradients_panel import ALLOCATORS, ESTIMATORS, Panel, measure_panel, named
from flops.experiments.gradients_tables import (
    Found,
    different,
    panel_sheets,
    records,
    select,
    shown,
    stage_names,
)
from flops.experiments.gradients_thirds import Thirds, measure_thirds
from flops.experiments.warm_starts import WarmStart, load_warm_start
from flops.experiments.weight_matrices import layer_numbers, matrix_of
from flops.report.grid import plot_bars, plot_grid
from flops.report.intervals import interval
from flops.report.table import Sheet
from flops.storage.disk import MEASURED, writing
from flops.storage.files import atomic_write, replacing
from flops.tasks.models.vit import parts as parts_of

Part = Literal["matrices", "kernel", "targets", "baselines"]
PARTS: tuple[Part, ...] = get_args(Part)
Settings = TypeVar("Settings", bound=WarmStart)
COSINE = "cosine"


@dataclass(frozen=True)
class GradientStudy:
    """Settings of the study.

    Attributes:
        folder: Folder of results, tables and figures.
        console: Shows progress bars and tables.
        panel: Settings shared by all panels; ablations use those that apply.
        stages: Steps of backpropagation before each measurement.
        estimators: Estimators of the panels.
        matrices: Matrices of the panels.
        layers: Layers of the panels, by number or as first, middle, last.
        learn: Training batches of shaped noise.
        workers: Processes, with one thread each; 0 runs in this process.
    """

    folder: Path
    console: Console
    panel: Panel = Panel()  # noqa: RUF009 (frozen)
    stages: tuple[int, ...] = (20, 150)
    estimators: tuple[str, ...] = ("lr", "spsa")
    matrices: tuple[str, ...] = ("key", "ff")
    layers: tuple[str, ...] = ("first", "middle", "last")
    learn: int = 30
    workers: int = 2

    def check(self) -> list[int]:
        """Validate the settings before anything is measured; return the numbers of the layers.

        Raises:
            FlopsError: If a setting is invalid.
        """
        panel = self.panel
        for what, given in (
            ("stages", self.stages),
            ("estimators", self.estimators),
            ("matrices", self.matrices),
            ("layers", self.layers),
            ("budgets", panel.budgets),
            ("allocators", panel.allocators),
        ):
            if not given or len(set(given)) < len(given):
                raise FlopsError(f"{what}: need at least one, each only once, not {list(given)}")
        for name in panel.allocators:
            named(ALLOCATORS, name, "allocator")
        for name in self.estimators:
            least = named(ESTIMATORS, name, "estimator")(1.0).minimum_queries
            if min(panel.budgets) < least:
                raise FlopsError(f"budgets: {name} needs at least {least}, not {panel.budgets}")
        if min(panel.repeats, panel.warm, self.learn) < 1 or panel.batch < 2 or self.workers < 0:
            raise FlopsError(
                "repeats, warm and learn >= 1, batch >= 2 and workers >= 0 are needed, not "
                f"{panel.repeats}, {panel.warm}, {self.learn}, {panel.batch} and {self.workers}"
            )
        if min(self.stages) < 0 or not 0 <= panel.seed < 2**63:
            raise FlopsError(
                f"stages >= 0 and 0 <= seed < 2**63 are needed, not {self.stages} and {panel.seed}"
            )
        if not (0 < panel.sigma < math.inf and 0 < panel.learning_rate < math.inf):
            raise FlopsError(
                "sigma and learning rate must be greater than 0 and finite, not "
                f"{panel.sigma} and {panel.learning_rate}"
            )
        model, data = load_warm_start(self.folder, replace(panel.start, steps=min(self.stages)))
        if len(data.train) < panel.batch:
            raise FlopsError(f"batch: there are {len(data.train)} points, not {panel.batch}")
        numbers = layer_numbers(self.layers, len(parts_of(model).layers))
        for layer in numbers:
            for name in self.matrices:
                matrix_of(model, layer, name)
        return numbers

    def run(
        self, part: str, measure: Callable[[Path, Settings], Result], every: Sequence[Settings]
    ) -> list[tuple[Settings, Result]]:
        """Results of all settings; saved ones are loaded."""
        cells = [Cell(part, partial(measure, self.folder), settings) for settings in every]
        found = run_cells(cells, self.folder, self.workers, self.console, part)
        return list(zip(every, found, strict=True))


def panels(study: GradientStudy, layers: Sequence[int]) -> list[Panel]:
    """All panels; those of early layers, the most expensive, first within a stage."""
    return [
        replace(study.panel, steps=steps, estimator=estimator, matrix=matrix, layer=layer)
        for steps in study.stages
        for estimator in study.estimators
        for matrix in study.matrices
        for layer in layers
    ]


def _matrices(study: GradientStudy, layers: Sequence[int]) -> tuple[list[Sheet], list[Sheet]]:
    found = study.run("matrices", measure_panel, panels(study, layers))
    write_csv(study.folder / "matrices.csv", records(found))
    for steps, name in stage_names(study.stages).items():
        here = select(found, steps=steps)
        path = study.folder / f"matrices-{steps}-steps.png"
        _draw(study, partial(_figure, path, here, name))
    return panel_sheets(found)


def _figure(path: Path, found: Found, stage: str) -> None:
    panel = found[0][0]
    grid = {
        (f"{shown(p.estimator)}, {shown(p.matrix)}", f"layer {p.layer}"): {
            shown(a): [interval(values) for values in result[COSINE][a]] for a in panel.allocators
        }
        for p, result in found
    }
    layers = different(found, "layer")
    alone = "only the matrix" if panel.perturb == "matrix" else "its third of the layers"
    title = (
        f"Cosine to the exact gradient, {stage}, {alone} perturbed\n"
        f"mean and 95 % interval of {panel.repeats} batches of {panel.batch} points; "
        f"layer {min(layers)} is nearest to the input"
    )
    plot_grid(path, grid, panel.budgets, title, ("mean queries per point", "cosine"))


def _ablation(name: str, study: GradientStudy) -> tuple[list[Sheet], list[Sheet]]:
    ablation = ABLATIONS[name]
    known = {f.name for f in fields(Thirds)}
    shared = {k: v for k, v in vars(study.panel).items() if k in known}
    every = [
        Thirds(**{**shared, "steps": steps, **options})
        for steps in study.stages
        for options in ablation.options(study.panel.warm, study.learn)
    ]
    found = study.run(name, measure_thirds, every)
    write_csv(study.folder / f"{name}.csv", ablation_records(found))
    bars = ablation_bars(ablation, found)
    if bars is not None:
        title = (
            f"{ablation.title}\nmean over the thirds, 95 % interval of {every[0].repeats} batches"
        )
        label = "cosine to the exact gradient"
        _draw(study, partial(plot_bars, study.folder / f"{name}.png", bars, title, label))
    return [ablation_sheet(ablation, found)], []


def _draw(study: GradientStudy, draw: Callable[[], None]) -> None:
    try:
        with writing(study.folder, MEASURED):
            draw()
    except ImportError as error:
        study.console.print(f"no figure was drawn: {error}", markup=False)


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per mapping, under a header with the names of the first."""
    with (
        writing(path, MEASURED),
        replacing(path) as scratch,
        scratch.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main(parts: Sequence[Part], study: GradientStudy) -> None:
    """Run the parts; tables go to the console and, by part, to Markdown, JSON and CSV.

    Raises:
        FlopsError: If something cannot be measured, or cells failed.
    """
    if not parts:
        raise FlopsError(f"parts: need at least one of {', '.join(PARTS)}")
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlopsError(f"cannot write to {study.folder}: {error.strerror}") from error
    layers = study.check()
    for steps in study.stages:  # here, not in every worker
        load_warm_start(study.folder, replace(study.panel.start, steps=steps))
    for part in dict.fromkeys(parts):
        sheets, long = _matrices(study, layers) if part == "matrices" else _ablation(part, study)
        kept = [{"title": s.title, "header": s.header, "rows": s.rows} for s in [*sheets, *long]]
        text = "\n".join(sheet.markdown() for sheet in [*sheets, *long])
        with writing(study.folder, MEASURED):
            atomic_write(study.folder / f"{part}.json", json.dumps(kept, indent=1) + "\n")
            atomic_write(study.folder / f"{part}.md", text)
        for sheet in sheets:
            sheet.print(study.console)
    study.console.print(f"written to {study.folder}", markup=False, soft_wrap=True)
