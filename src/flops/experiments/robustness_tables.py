"""Tables of the study of robustness."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flops.experiments.cells import Result
from flops.experiments.robustness_trials import ATTACKS, KINDS, Kind, Strengths, Trial
from flops.report.intervals import interval
from flops.report.table import Sheet
from flops.storage.files import replacing

TITLES: dict[Kind, str] = {
    "clean": "Original",
    "gaussian": "Gaussian",
    "uniform": "Uniform",
    "poisson": "Poisson",
    "fgsm": "FGSM",
    "i-fgsm": "I-FGSM",
    "mi-fgsm": "MI-FGSM",
}
COLUMNS = tuple(TITLES[kind] for kind in KINDS)
BASE = "bp"  # reference of the differences


@dataclass(frozen=True)
class Found:
    """All results.

    Attributes:
        data: Name of the data.
        rows: Every trial with its result.
    """

    data: str
    rows: Sequence[tuple[Trial, Result]]

    @property
    def methods(self) -> list[str]:
        """Methods in the order of the tables."""
        return list(dict.fromkeys(trial.method for trial, _ in self.rows))

    def accuracy(self, method: str, kind: Kind, strength: float) -> dict[int, float]:
        """Accuracy in percent, by seed."""
        return {
            trial.seed: 100 * result["accuracy"]
            for trial, result in self.rows
            if (trial.method, trial.kind, trial.strength) == (method, kind, strength)
        }

    def relative(self, method: str, kind: Kind, strength: float) -> dict[int, float]:
        """Accuracy under noise in percent of the same model's clean accuracy; NaN for 0 / 0."""
        clean = self.accuracy(method, "clean", 0.0)
        return {
            seed: 100 * value / clean[seed] if clean[seed] else math.nan
            for seed, value in self.accuracy(method, kind, strength).items()
        }

    def unmoved(self, method: str) -> float:
        """Share of images, over all attacks, that an attack left unchanged."""
        rows = [r for t, r in self.rows if t.method == method and t.kind in ATTACKS]
        return float(sum(r["unmoved"] for r in rows) / max(1, sum(r["points"] for r in rows)))


def accuracy_sheet(found: Found, strengths: Strengths, note: str) -> Sheet:
    """The paper's table."""
    rows = [
        (found.data, m, *(_spread(found.accuracy(m, k, strengths.of(k)).values()) for k in KINDS))
        for m in found.methods
    ]
    title = "Test accuracy under natural and adversarial noise, %"
    return Sheet(title, ("data", "method", *COLUMNS), rows, note)


def relative_sheet(found: Found, strengths: Strengths) -> Sheet:
    """Accuracy relative to each model's clean accuracy."""
    rows = [
        (m, *(_spread(found.relative(m, k, strengths.of(k)).values()) for k in KINDS[1:]))
        for m in found.methods
    ]
    note = "Accuracy under noise / accuracy of the same model on clean images: methods differ in "
    note += "the latter, and a less accurate model has less to lose."
    return Sheet("Relative accuracy, %", ("method", *COLUMNS[1:]), rows, note)


def differences_sheets(found: Found, strengths: Strengths) -> list[Sheet]:
    """Differences to backpropagation, paired by seed, of accuracy and of relative accuracy.

    Returns:
        Empty without runs of backpropagation, or without other runs.
    """
    others = [method for method in found.methods if method != BASE]
    if not others or BASE not in found.methods:
        return []
    return [
        _differences(found.accuracy, others, KINDS, strengths, "accuracy"),
        _differences(found.relative, others, KINDS[1:], strengths, "relative accuracy"),
    ]


def _differences(
    values: Callable[[str, Kind, float], dict[int, float]],
    others: Sequence[str],
    kinds: Sequence[Kind],
    strengths: Strengths,
    name: str,
) -> Sheet:
    rows = []
    for method in others:
        pairs = []
        for kind in kinds:
            one, base = (values(m, kind, strengths.of(kind)) for m in (method, BASE))
            pairs.append([one[seed] - base[seed] for seed in one if seed in base])
        rows.append((method, str(len(pairs[0])), *map(_interval, pairs)))
    note = "Mean over the seeds that both have and 95 % t interval, paired by seed; one pair has no"
    note += " interval."
    if name != "accuracy":
        note += " Relative to each model's own accuracy on clean images."
    header = ("method", "pairs", *(TITLES[kind] for kind in kinds))
    return Sheet(f"Difference to {BASE}, points of {name}", header, rows, note)


def bounds_sheet(found: Found, strengths: Strengths) -> Sheet | None:
    """Accuracy by bound of the attacks; None for one bound."""
    bounds = strengths.all_bounds
    if len(bounds) < 2:
        return None
    rows = []
    for kind in ATTACKS:
        for method in found.methods:
            clean = _spread(found.accuracy(method, "clean", 0.0).values())
            cells = [_spread(found.accuracy(method, kind, bound).values()) for bound in bounds]
            rows.append((TITLES[kind], method, clean, *cells))
    header = ("attack", "method", "0", *(f"{bound:g}/255" for bound in bounds))
    note = "Mean ± standard deviation over the seeds; plotted in bounds.png."
    return Sheet("Test accuracy by the attack's bound, %", header, rows, note)


def write_csv(path: Path, found: Found) -> None:
    """Write a line for every trial: one model under one kind of noise."""
    names = ("data", "method", "seed", "noise", "strength", "steps", "points", "correct")
    with replacing(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([*names, "accuracy_percent", "kept_percent", "loss", "unmoved"])
        for trial, result in found.rows:
            relative = found.relative(trial.method, trial.kind, trial.strength)[trial.seed]
            start = (found.data, trial.method, trial.seed, trial.kind, trial.strength, trial.steps)
            counts = (result["points"], result["correct"], f"{100 * result['accuracy']:.4f}")
            end = ("" if math.isnan(relative) else f"{relative:.4f}", f"{result['loss']:.6g}")
            lines.writerow([*start, *counts, *end, result["unmoved"]])


def _spread(values: Iterable[float]) -> str:
    """Mean ± standard deviation; only the mean for one seed."""
    given = list(values)
    if not given or any(math.isnan(v) for v in given):
        return "-"
    found = interval(given)
    return f"{found.mean:.1f} ± {found.spread:.1f}" if len(given) > 1 else f"{found.mean:.1f}"


def _interval(pairs: Sequence[float]) -> str:
    if not pairs or any(math.isnan(v) for v in pairs):
        return "-"
    return interval(pairs).shown(1, sign=True)
