"""Tables and summary of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flops.estimators.likelihood_ratio import Targets
from flops.experiments.compare_methods import BP, variant
from flops.experiments.compare_runs import Unit
from flops.report.intervals import interval
from flops.report.table import Sheet
from flops.training.methods import Method

Results = Mapping[str, Sequence[Mapping[str, Any]]]


def table(
    results: Results,
    mark: str,
    title: str,
    note: str,
    targets: Targets | None = None,
    unit: Unit = "epochs",
) -> Sheet:
    """One row per method: mean ± standard deviation over the seeds.

    Args:
        results: Results of the seeds, by method.
        mark: "at_budget", "at_epochs" or "at_steps".
        title: Title of the table.
        note: Text below the table.
        targets: What likelihood ratio perturbs; None for the default of each method.
        unit: Unit of the length of training.
    """
    rows = []
    header = ("method", "perturbs", "test accuracy, %", unit, "queries", "forwards", "s", "MB")
    for method, found in results.items():
        seen = [one[mark] for one in found]
        accuracy = interval([100 * e["test"] for e in seen])
        rows.append(
            (
                method,
                _perturbs(method, targets),
                f"{accuracy.mean:.1f} ± {accuracy.spread:.1f}"
                if len(seen) > 1
                else f"{accuracy.mean:.1f}",
                f"{np.mean([e[unit.removesuffix('s')] for e in seen]):.0f}",
                _short(float(np.mean([e["queries"] for e in seen]))),
                _short(float(np.mean([e["forward_equivalents"] for e in seen]))),
                f"{np.mean([e['seconds'] for e in seen]):.0f}",
                f"{np.mean([one['peak_memory'] for one in found]) / 2**20:.0f}",
            )
        )
    return Sheet(title, header, rows, note)


def above(results: Results, budget: float) -> str:
    """A sentence about methods that cost more than the budget; empty without one.

    What a step costs is known from the second on.
    """
    spent = {
        method: float(np.mean([one["at_budget"]["forward_equivalents"] for one in found]))
        for method, found in results.items()
    }
    over = [f"{method} ({cost:,.0f})" for method, cost in spent.items() if cost > 1.001 * budget]
    if not over:
        return ""
    return f" Above the budget, which does not cover two steps: {', '.join(over)}."


def _perturbs(spelled: str, targets: Targets | None) -> str:
    name = variant(spelled).name
    if name is None:
        return "-"
    return Method(name, targets=targets if "lr" in name else None).perturbs or "-"


def sweep_table(chosen: Mapping[str, Any], unit: Unit = "epochs") -> Sheet | None:
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
                noise = f"{t.sigma:g}" if variant(method).has_sigma else "-"
                rows.append((method, length, f"{pair[0]:g}", noise, *scores, " ".join(names)))
    header = ("method", "run", "learning rate", "sigma", "equal cost, %", f"equal {unit}, %", "for")
    note = (
        "Validation accuracy, and the table that a setting was chosen for: the best full run. If "
    )
    note += "the two best rates of the short runs were close, both had full runs. One seed, not "
    note += "among those reported. A run that diverged has no accuracy."
    return Sheet("Sweep", header, rows, note) if rows else None


def difference(results: Results, better: str, worse: str, mark: str) -> str:
    """Paired difference of two methods in points of test accuracy, with its 95 % interval."""
    pairs = zip(results[better], results[worse], strict=True)
    values = [100 * (a[mark]["test"] - b[mark]["test"]) for a, b in pairs]
    return f"{better} - {worse}: {interval(values).shown(1, sign=True)}"


PAIRS = (
    ("ops-lr", "lr", "at_budget"),
    ("ops-spsa", "n-spsa", "at_budget"),
    ("shaped-lr", "ops-lr", "at_budget"),
    ("lr", "mezo", "at_budget"),
    ("n-spsa", "mezo", "at_budget"),
    ("deepzero", "mezo", "at_budget"),
    ("shaped-lr", "bp", "at_epochs"),
)


def compared_pairs(methods: Sequence[str], at_length: str) -> list[tuple[str, str, str]]:
    """Pairs of methods whose difference is shown, and where.

    For texts, shaped-lr in all its variants: against every other forward method and the unmodified
    model at equal cost, against backpropagation at equal steps.
    """
    if at_length == "at_epochs":
        return [pair for pair in PAIRS if {*pair[:2]} <= set(methods)]
    kinds = {method: variant(method) for method in methods}
    ours = [m for m, kind in kinds.items() if kind.name == "shaped-lr"]
    found = []
    for better in ours:
        for worse, kind in kinds.items():
            if worse not in ours:
                mark = at_length if kind.name == BP else "at_budget"
                found.append((better, worse, mark))
    return found


def differences(results: Results, at_length: str = "at_epochs") -> Sheet | None:
    """Selected differences, paired by seed; None for one seed."""
    rows = []
    for better, worse, mark in compared_pairs(list(results), at_length):
        if len(results[better]) > 1:
            name, value = difference(results, better, worse, mark).split(": ")
            where = "cost" if mark == "at_budget" else mark.removeprefix("at_")
            rows.append((name, f"equal {where}", value))
    note = "Points of test accuracy, mean over seeds and 95 % interval, paired by seed."
    return Sheet("Differences", ("methods", "at", "difference"), rows, note) if rows else None


def sentence(results: Results, length: int, unit: Unit = "epochs") -> str:
    """Summary in one sentence."""

    def mean(method: str, mark: str) -> float:
        return float(100 * np.mean([one[mark]["test"] for one in results[method]]))

    at, ends = f"at_{unit}", f"{length} {unit if length > 1 else unit.removesuffix('s')}"
    forward = [m for m in results if variant(m).forward]
    if not forward:
        reached = {m: mean(m, at) for m in results}
        best = max(reached, key=lambda m: reached[m])
        name = "Backpropagation" if best == BP else best
        return f"{name} reached {reached[best]:.1f} % after {ends}."
    order = sorted(forward, key=lambda m: -mean(m, "at_budget"))
    ranks = ", ".join(f"{m} {mean(m, 'at_budget'):.1f}" for m in order)
    said = f"At equal cost the forward methods reach test accuracies of {ranks} %"
    if BP in results:
        best = order[0]
        gap = mean(BP, at) - mean(best, at)
        side = "below" if gap >= 0 else "above"
        said += f"; after {ends} {best} is {abs(gap):.1f} points {side} backpropagation"
    return said + "."


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
