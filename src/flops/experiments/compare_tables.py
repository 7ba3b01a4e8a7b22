"""Tables, plot and summary of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flops.estimators.likelihood_ratio import Targets
from flops.report.intervals import interval
from flops.report.plots import matplotlib_figures
from flops.report.table import Sheet
from flops.storage.files import replacing
from flops.training.methods import WITHOUT_SIGMA, Method, MethodName

Results = Mapping[MethodName, Sequence[Mapping[str, Any]]]
HEADER = ("method", "perturbs", "test accuracy, %", "epochs", "queries", "forwards", "s", "MB")


def table(
    results: Results, mark: str, title: str, note: str, targets: Targets | None = None
) -> Sheet:
    """One row per method: mean ± standard deviation over the seeds.

    Args:
        results: Results of the seeds, by method.
        mark: "at_budget" or "at_epochs".
        title: Title of the table.
        note: Text below the table.
        targets: What likelihood ratio perturbs; None for the default of each method.
    """
    rows = []
    for method, found in results.items():
        seen = [one[mark] for one in found]
        accuracy = interval([100 * e["test"] for e in seen])
        rows.append(
            (
                method,
                Method(method, targets=targets if "lr" in method else None).perturbs or "-",
                f"{accuracy.mean:.1f} ± {accuracy.spread:.1f}"
                if len(seen) > 1
                else f"{accuracy.mean:.1f}",
                f"{np.mean([e['epoch'] for e in seen]):.0f}",
                _short(float(np.mean([e["queries"] for e in seen]))),
                _short(float(np.mean([e["forward_equivalents"] for e in seen]))),
                f"{np.mean([e['seconds'] for e in seen]):.0f}",
                f"{np.mean([one['peak_memory'] for one in found]) / 2**20:.0f}",
            )
        )
    return Sheet(title, HEADER, rows, note)


def sweep_table(chosen: Mapping[MethodName, Any]) -> Sheet | None:
    """Results of the sweep, the best at equal cost first; None without a sweep."""
    rows = []
    for method, c in chosen.items():
        tables = {"a": (c.learning_rate, c.sigma), "b": (c.epochs_rate, c.epochs_sigma)}
        for length, tried in (("full", c.finals), ("short", c.tried)):
            for t in sorted(tried, key=lambda t: t.score("cost"), reverse=True):
                pair = (t.learning_rate, t.sigma)
                last = "full" if c.finals else "short"
                names = [n for n, p in tables.items() if p == pair and length == last]
                scores = ("-" if x is None else f"{100 * x:.1f}" for x in (t.cost, t.epochs))
                noise = "-" if method in WITHOUT_SIGMA else f"{t.sigma:g}"
                rows.append((method, length, f"{pair[0]:g}", noise, *scores, " ".join(names)))
    header = ("method", "run", "learning rate", "sigma", "equal cost, %", "equal epochs, %", "for")
    note = (
        "Validation accuracy, and the table that a setting was chosen for: the best full run. If "
    )
    note += "the two best rates of the short runs were close, both had full runs. One seed, not "
    note += "among those reported. A run that diverged has no accuracy."
    return Sheet("Sweep", header, rows, note) if rows else None


def difference(results: Results, better: MethodName, worse: MethodName, mark: str) -> str:
    """Paired difference of two methods in points of test accuracy, with its 95 % interval."""
    pairs = zip(results[better], results[worse], strict=True)
    values = [100 * (a[mark]["test"] - b[mark]["test"]) for a, b in pairs]
    return f"{better} - {worse}: {interval(values).shown(1, sign=True)}"


PAIRS: tuple[tuple[MethodName, MethodName, str], ...] = (
    ("ops-lr", "lr", "at_budget"),
    ("ops-spsa", "n-spsa", "at_budget"),
    ("shaped-lr", "ops-lr", "at_budget"),
    ("lr", "mezo", "at_budget"),
    ("n-spsa", "mezo", "at_budget"),
    ("deepzero", "mezo", "at_budget"),
    ("shaped-lr", "bp", "at_epochs"),
)


def differences(results: Results) -> Sheet | None:
    """Selected differences, paired by seed; None for one seed."""
    rows = []
    for better, worse, mark in PAIRS:
        if better in results and worse in results and len(results[better]) > 1:
            name, value = difference(results, better, worse, mark).split(": ")
            rows.append((name, "equal cost" if mark == "at_budget" else "equal epochs", value))
    note = "Points of test accuracy, mean over seeds and 95 % interval, paired by seed."
    return Sheet("Differences", ("methods", "at", "difference"), rows, note) if rows else None


def sentence(results: Results, epochs: int) -> str:
    """Summary in one sentence."""

    def mean(method: MethodName, mark: str) -> float:
        return float(100 * np.mean([one[mark]["test"] for one in results[method]]))

    forward = [m for m in results if m != "bp"]
    if not forward:
        return f"Backpropagation reached {mean('bp', 'at_epochs'):.1f} % after {epochs} epochs."
    order = sorted(forward, key=lambda m: -mean(m, "at_budget"))
    ranks = ", ".join(f"{m} {mean(m, 'at_budget'):.1f}" for m in order)
    said = f"At equal cost the forward methods reach test accuracies of {ranks} %"
    if "bp" in results:
        best = order[0]
        gap = mean("bp", "at_epochs") - mean(best, "at_epochs")
        side = "below" if gap >= 0 else "above"
        said += f"; after {epochs} epochs {best} is {abs(gap):.1f} points {side} backpropagation"
    return said + "."


def plot(path: Path, results: Results) -> None:
    """Plot validation accuracy against forward equivalents: mean and range over seeds."""
    figure = matplotlib_figures().Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for method, found in results.items():
        curves = [one["curve"] for one in found]
        length = min(map(len, curves))
        cost = np.mean([[e["forward_equivalents"] for e in c[:length]] for c in curves], axis=0)
        score = 100 * np.array([[e["accuracy"] for e in c[:length]] for c in curves])
        shown = cost > 0
        (line,) = axis.plot(cost[shown], score.mean(0)[shown], label=method, linewidth=1.5)
        low, high = score.min(0)[shown], score.max(0)[shown]
        axis.fill_between(cost[shown], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axis.set_xscale("log")
    axis.set_xlabel("forward equivalents")
    axis.set_ylabel("validation accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(loc="best", fontsize=8)
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=120)


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
