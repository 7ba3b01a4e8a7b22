"""Tables of the study of shaped noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from flops.experiments.cells import Result
from flops.experiments.shaped_problems import mean_cosine
from flops.experiments.shaped_training import THIRDS, cost_to_reach, mean_cosines, steps_above
from flops.report.intervals import Interval, interval, paired
from flops.report.table import Sheet

ABOVE, POINT = 0.8, 0.01


def _by_third(results: Sequence[Result], start: int) -> list[Interval]:
    """Mean cosine of each third, over the seeds."""
    seeds = [mean_cosines(result, start) for result in results]
    return [interval(column) for column in zip(*seeds, strict=True)]


def main_sheet(found: Mapping[tuple[int, int, bool], Sequence[Result]]) -> Sheet:
    """Cosines of each third while the ViT is fine-tuned.

    Args:
        found: By queries, first step of the mean, and whether outputs are learned from.
    """
    lines = []
    for (queries, start, outputs), results in found.items():
        seeds = [mean_cosines(result, start) for result in results]
        least = " / ".join(f"{min(column):.3f}" for column in zip(*seeds, strict=True))
        name = f"{queries} queries, from step {start}" + ("" if outputs else ", losses alone")
        reached = [steps_above(result, 0, ABOVE) for result in results]
        steps = " ".join("-" if step is None else str(step) for step in reached)
        lines.append([name, *(i.shown() for i in _by_third(results, start)), least, steps])
    return Sheet(
        "Cosine to the exact gradient while fine-tuning",
        ["", *THIRDS, "minimum over seeds", f"first third above {ABOVE}"],
        lines,
        "Mean over the later steps and the seeds, with 95 % intervals over seeds; updates follow "
        "the estimate. Last column: the first step at which this and the next measurement are "
        "above, by seed.",
    )


def allocators_sheet(found: Mapping[str, Sequence[Result]], queries: int, start: int) -> Sheet:
    """Cosines of each third by allocator, and the difference to the first one, paired by seed."""
    lines, reference = [], next(iter(found.values()))
    for name, results in found.items():
        seeds = [statistics.fmean(mean_cosines(result, start)) for result in results]
        first = [statistics.fmean(mean_cosines(result, start)) for result in reference]
        difference = "" if results is reference else paired(seeds, first).shown(sign=True)
        lines.append([name, *(i.shown() for i in _by_third(results, start)), difference])
    return Sheet(
        f"Cosine by allocator, {queries} queries",
        ["", *THIRDS, "mean, over the first"],
        lines,
        f"Mean over the steps from {start} on and the seeds, with 95 % intervals over seeds; "
        "differences are paired by seed.",
    )


def cost_sheet(found: Mapping[str, Sequence[Result]]) -> Sheet:
    """Forward equivalents to come within a point of backpropagation, over those of its epochs."""
    reference = found["backpropagation"]
    lines = []
    for name, results in found.items():
        ratios = []
        for result, truth in zip(results, reference, strict=True):
            cost = cost_to_reach(result, truth["validation"] - POINT)
            ratios.append(None if cost is None else cost / truth["forward equivalents"])
        reached = [ratio for ratio in ratios if ratio is not None]
        mean = interval(reached).shown(2) if len(reached) == len(ratios) else "-"
        shown = " ".join("-" if ratio is None else f"{ratio:.1f}" for ratio in ratios)
        final = interval([100 * result["validation"] for result in results]).shown(1)
        lines.append([name, mean, shown, final])
    return Sheet(
        "Cost to come within a point of backpropagation",
        ["", "over backpropagation", "by seed", "validation at the end (%)"],
        lines,
        "Forward equivalents until the validation accuracy (mean of two epochs) is within a point "
        "of backpropagation's after its epochs, over the cost of these; 95 % intervals over seeds.",
    )


def defaults_sheet(found: Mapping[str, Sequence[Result]]) -> Sheet:
    """Test accuracy and cost of a new user's first run."""
    truth = found["backpropagation"]
    lines = []
    for name, results in found.items():
        right = interval([100 * result["test"] for result in results]).shown(1)
        pairs = zip(results, truth, strict=True)
        costs = [a["forward equivalents"] / b["forward equivalents"] for a, b in pairs]
        seconds = statistics.fmean(result["seconds"] for result in results)
        lines.append([name, right, interval(costs).shown(1), f"{seconds:.0f}"])
    return Sheet(
        "Defaults: all parameters, five epochs",
        ["", "test (%)", "cost over backpropagation", "seconds"],
        lines,
        "95 % intervals over seeds.",
    )


def problems_sheet(found: Mapping[str, Sequence[Result]], start: int) -> Sheet:
    """Shaped against isotropic noise, paired by seed."""
    lines = []
    for name, results in found.items():
        shaped = [mean_cosine(result, "shaped", start) for result in results]
        isotropic = [mean_cosine(result, "isotropic", start) for result in results]
        lines.append(
            [
                name,
                interval(shaped).shown(),
                interval(isotropic).shown(),
                paired(shaped, isotropic).shown(sign=True),
            ]
        )
    return Sheet(
        "Shaped and isotropic noise on other problems",
        ["problem", "shaped", "isotropic", "difference"],
        lines,
        f"Mean cosine over groups and over the steps from {start} on, 95 % intervals over seeds, "
        "the difference paired by seed; updates follow the exact gradient.",
    )


def best_rates(sweep: Mapping[tuple[str, float], Sequence[Result]]) -> dict[str, float]:
    """By method, the rate with the best mean validation accuracy; the loss breaks ties."""

    def quality(key: tuple[str, float]) -> tuple[float, float]:
        right = statistics.fmean(r["validation"] for r in sweep[key])
        return right, -statistics.fmean(r["validation loss"] for r in sweep[key])

    best: dict[str, float] = {}
    for key in sorted(sweep, key=quality):
        best[key[0]] = key[1]
    return best


def sweep_sheet(sweep: Mapping[tuple[str, float], Sequence[Result]]) -> Sheet:
    """Validation accuracy by method and learning rate."""
    rates, best = list(dict.fromkeys(rate for _, rate in sweep)), best_rates(sweep)
    lines = []
    for method in dict.fromkeys(method for method, _ in sweep):
        means = (statistics.fmean(r["validation"] for r in sweep[method, x]) for x in rates)
        lines.append([method, *(f"{100 * mean:.1f}" for mean in means), f"{best[method]:g}"])
    header = ["validation accuracy (%)", *(f"{rate:g}" for rate in rates), "chosen"]
    return Sheet("Learning rates, on the validation split", header, lines)


def accuracy_sheet(found: Mapping[str, Sequence[Result]], rates: Mapping[str, float]) -> Sheet:
    """Test accuracy and cost of every method, and differences to backpropagation."""
    lines, truth = [], [100 * r["test"] for r in found["backpropagation"]]
    for method, results in found.items():
        right = [100 * r["test"] for r in results]
        cost = interval([r["forward equivalents"] for r in results])
        own = method == "backpropagation"
        difference = "" if own else paired(right, truth).shown(2, sign=True)
        lines.append(
            [
                method,
                f"{rates[method]:g}",
                interval(right).shown(2),
                difference,
                f"{cost.mean:,.0f}",
                f"{statistics.fmean(r['seconds'] for r in results):.0f}",
            ]
        )
    return Sheet(
        "Test accuracy after the same number of epochs",
        ["method", "learning rate", "test (%)", "difference", "forward equivalents", "seconds"],
        lines,
        "95 % intervals over seeds, the difference paired by seed; backpropagation is charged "
        "three forward passes per point.",
    )


def ingredients_sheet(found: Mapping[tuple[str, int], Sequence[Result]], start: int) -> Sheet:
    """Ablation of the ingredients, with stage targets."""
    lines = [
        [name, str(queries), *(i.shown() for i in _by_third(results, start))]
        for (name, queries), results in found.items()
    ]
    note = f"Mean cosine over the steps from {start} on; updates follow the exact gradient."
    return Sheet("Ablation of the ingredients", ["", "queries", *THIRDS], lines, note)


def grid_sheet(found: Mapping[tuple[str, str, int], Sequence[Result]], start: int) -> Sheet:
    """Cosines by target, noise and queries; the thirds in one cell."""
    columns = sorted({queries for _, _, queries in found})
    lines = []
    for targets, noise in dict.fromkeys((t, n) for t, n, _ in found):
        cells = []
        for queries in columns:
            results = found[targets, noise, queries]
            means = (f"{i.mean:.2f}" for i in _by_third(results, start))
            cells.append(" / ".join(means))
        lines.append([f"{targets}, {noise}", *cells])
    return Sheet(
        "Cosine by target, noise and queries",
        ["first / middle / last third", *(f"{queries} queries" for queries in columns)],
        lines,
        f"Mean over the steps from {start} on; updates follow the exact gradient.",
    )
