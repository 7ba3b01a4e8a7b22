"""Results of a comparison: results.json, its tables, and its report page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from flops.errors import FlopsError
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.cells import Result
from flops.experiments.compare_curves import chart, mean_curves
from flops.experiments.compare_runs import MethodComparison, Unit
from flops.experiments.compare_sweep import Chosen, Tried
from flops.experiments.compare_tables import above, differences, sentence, sweep_table, table
from flops.report import html
from flops.report.names import method_name
from flops.report.run_record import ReportError
from flops.report.svg import Chart, Curve
from flops.report.table import Sheet
from flops.storage.plain import parse_object
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.classification.task import load_data
from flops.tasks.models.vit import image_format
from flops.tasks.text import TextConfig
from flops.tasks.text.data import load_texts
from flops.training.environment import environment

# Settings that differ between the runs of a comparison, or have no meaning there.
OF_RUNS: tuple[str, ...] = (
    "method",
    "learning_rate",
    "sigma",
    "seed",
    "epochs",
    "steps",
    "budget",
    "until",
)
OF_RUNS += ("marks", "test", "output", "plots", "checkpoint_steps", "checkpoint_seconds", "timeout")
OF_RUNS += ("evaluate_every", "evaluate_steps", "cosine_steps", "lora", "lora_alpha")
COST = (
    "queries: rows with noise; forwards: forward equivalents, 3 per point for backpropagation; "
    "MB: peak memory of the process, libraries included."
)


@dataclass(frozen=True)
class ComparisonResults:
    """All that a finished comparison found.

    Attributes:
        unit: Unit of the length.
        length: Epochs or steps of table (b).
        budget: Forward equivalents of table (a).
        chosen: Chosen settings, by method.
        results: Results of the seeds, by method.
        settings: Model, data and the other settings of all runs.
        targets: What likelihood ratio perturbs; None for the default of each method.
        chance: Accuracy of guessing; None if it is unknown.
        environment: Versions, cores and threads; empty if unknown.
    """

    unit: Unit
    length: int
    budget: float
    chosen: Mapping[str, Chosen]
    results: Mapping[str, list[Result]]
    settings: dict[str, Any] = field(default_factory=dict)
    targets: Targets | None = None
    chance: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        study: MethodComparison,
        chosen: Mapping[str, Chosen],
        results: Mapping[str, list[Result]],
    ) -> ComparisonResults:
        """The results of a comparison whose budget is known."""
        return cls(
            study.unit,
            study.length,
            study.budget or 0.0,
            chosen,
            results,
            {
                "seeds": study.seeds,
                study.unit: study.length,
                "budget": study.budget,
                **{n: v for n, v in study.base.to_dict().items() if n not in OF_RUNS},
            },
            study.base.targets,
            chance_level(study.base),
            environment(),
        )

    @classmethod
    def read(cls, folder: Path) -> ComparisonResults:
        """Read results.json, also of older versions.

        Raises:
            ReportError: It cannot be read, or is not of a comparison.
        """
        path = folder / "results.json"
        try:
            kept = parse_object(path.read_bytes())
            unit: Unit = "steps" if "steps" in kept else "epochs"
            chosen = {
                method: Chosen(
                    **{
                        **values,
                        "tried": tuple(Tried(**t) for t in values["tried"]),
                        "finals": tuple(Tried(**t) for t in values["finals"]),
                    }
                )
                for method, values in kept["chosen"].items()
            }
            found = cls(unit, int(kept[unit]), float(kept["budget"]), chosen, kept["results"])
            more = ("settings", "targets", "chance", "environment")
            found = dataclasses.replace(found, **{n: kept[n] for n in more if n in kept})
            mean_curves(found.results)  # raises if results are incomplete
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, AttributeError, FlopsError) as error:
            raise ReportError(f"{path} is damaged, or not of a comparison: {error!r}") from error
        return found

    def to_dict(self) -> dict[str, Any]:
        """Values for results.json."""
        return {
            self.unit: self.length,
            "budget": self.budget,
            "chosen": {m: dataclasses.asdict(c) for m, c in self.chosen.items()},
            "results": dict(self.results),
            "settings": self.settings,
            "targets": self.targets,
            "chance": self.chance,
            "environment": self.environment,
        }

    @property
    def seeds(self) -> int:
        """Number of reported seeds."""
        return max((len(runs) for runs in self.results.values()), default=0)

    @property
    def title(self) -> str:
        """Model and data."""
        names = [str(self.settings.get(n, "")).rstrip("/") for n in ("model", "data")]
        model, data = (name.rsplit("/", 1)[-1] for name in names)
        model = {"bundled": "Bundled model"}.get(model, model)
        return f"{model} on {data}" if model and data else "Comparison"

    def sheets(self) -> list[Sheet]:
        """The tables: equal cost, equal length, differences, sweep."""
        some = self.seeds
        spread = f"mean ± standard deviation over {some} seeds" if some > 1 else "1 seed"
        titles = {
            "at_budget": f"(a) Equal cost: {self.budget:,.0f} forward equivalents, {spread}",
            f"at_{self.unit}": f"(b) Equal {self.unit}: {self.length}, {spread}",
        }
        notes = {"at_budget": COST + above(self.results, self.budget)}
        found: list[Sheet | None] = [
            table(self.results, mark, title, notes.get(mark, COST), self.targets, self.unit)
            for mark, title in titles.items()
        ]
        found.append(differences(self.results, f"at_{self.unit}"))
        found.append(sweep_table(self.chosen, self.unit))
        return [sheet for sheet in found if sheet is not None]

    def sentence(self) -> str:
        """The result in a sentence."""
        return sentence(self.results, self.length, self.unit)

    def page(self) -> str:
        """The report page."""
        charts = chart(self.results, self.chance).html() + self._seconds().html()
        parts = [f"<p>{escape(self.sentence())}</p>", f'<div class="charts">{charts}</div>']
        for sheet in self.sheets():
            parts.append(f"<h2>{escape(sheet.title)}</h2>")
            parts.append(html.table(sheet.header, sheet.rows))
            if sheet.note:
                parts.append(f'<p class="note">{escape(sheet.note)}</p>')
        if self.settings:
            parts += ["<h2>Settings</h2>", html.setting_table(self.settings)]
        parts.append(html.environment_table(self.environment))
        methods = ", ".join(map(method_name, self.results))
        return html.page(f"{self.title}: methods compared", methods, *parts)

    def _seconds(self) -> Chart:
        """Accuracy against the time of the training steps."""
        curves = []
        for slot, method in enumerate(mean_curves(self.results)):
            runs = self.results[method]
            points = [
                (e["seconds"], 100 * e["accuracy"]) for e in runs[0]["curve"] if e["step"] > 0
            ]
            curves.append(Curve(method_name(method), points, slot, marked=True))
        note = "Of the first seed; one thread, and other runs beside it."
        title, x = "Accuracy against time", "time of the training steps, s"
        return Chart(title, x, "validation accuracy, %", curves, log_x=True, note=note)


def chance_level(base: FinetuneConfig | TextConfig) -> float | None:
    """Accuracy of guessing; None if it is unknown, since a picture is not worth an error."""
    try:
        if isinstance(base, TextConfig):
            texts = load_texts(
                base.data,
                base.named_columns(),
                splits=base.named_splits(),
                config=base.data_config,
                limit=base.limit,
            )
            classes = () if texts.train.completions else texts.classes
        else:
            classes = load_data(base, image_format(base.model)).classes
    except (FlopsError, OSError, ValueError, ImportError):
        return None
    return 1 / len(classes) if len(classes) > 1 else None
