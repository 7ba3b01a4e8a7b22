"""Tables of the panels: means and paired differences, for the paper's claims.

All panels of a study see the same batches in the same repeats, so a mean over panels is taken
within each repeat, and intervals are over the repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flops.experiments.cells import Result
from flops.experiments.gradients_panel import Panel
from flops.experiments.weight_matrices import TITLES
from flops.report.intervals import Interval, interval, paired
from flops.report.table import Sheet

Found = Sequence[tuple[Panel, Result]]
NAMES = {"lr": "LR", "spsa": "SPSA", "es": "ES", "diagonal": "Gaussian, diagonal"}
PAIRS = (("gaussian", "equal"), ("neyman", "equal"), ("gaussian", "bernoulli"))
NOTE = (
    "Intervals are 95 % t-intervals over {} batches, each with its own noise, for one start model"
)
SUFFICE = 20  # the paper's budget


def shown(name: str) -> str:
    """Display name of an estimator, matrix or allocator."""
    titles = {**TITLES, **NAMES}
    return titles.get(name, name if name == "equal" else name.capitalize())


def stage_names(steps: Iterable[int]) -> dict[int, str]:
    """Early, middle and late, with their steps of backpropagation."""
    order = sorted(set(steps))
    if len(order) == 1:
        return {order[0]: f"after {order[0]} steps"}
    words = {order[0]: "early", order[-1]: "late"}
    return {s: f"{words.get(s, 'middle')} ({s} steps)" for s in order}


def over_panels(found: Found, allocator: str, place: int) -> list[float]:
    """Mean cosine over the panels at one of the budgets, per repeat."""
    columns = [result["cosine"][allocator][place] for _, result in found]
    return [sum(values) / len(values) for values in zip(*columns, strict=True)]


def select(found: Found, **wanted: Any) -> Found:
    """The panels with these settings."""
    return [
        (panel, result)
        for panel, result in found
        if all(getattr(panel, key) == value for key, value in wanted.items())
    ]


def different(found: Found, name: str) -> list[Any]:
    """Distinct values of a setting among the panels, in order."""
    return list(dict.fromkeys(getattr(panel, name) for panel, _ in found))


def _rows(found: Found, line: Callable[[Found], list[list[str]]]) -> list[list[str]]:
    """Rows of every stage and estimator, with these as first columns."""
    names, rows = stage_names(different(found, "steps")), []
    for steps in different(found, "steps"):
        for estimator in different(found, "estimator"):
            part = select(found, steps=steps, estimator=estimator)
            rows += [[names[steps], shown(estimator), *cells] for cells in line(part)]
    return rows


def _header(found: Found, *first: str) -> list[str]:
    return ["stage", "estimator", *first, *(f"{b} queries" for b in found[0][0].budgets)]


def _growth(found: Found) -> list[str]:
    return ["growth"] if len(found[0][0].budgets) > 1 else []


def means_sheet(found: Found) -> Sheet:
    """Mean cosine over matrices and layers."""
    panel = found[0][0]

    def line(part: Found) -> list[list[str]]:
        places = range(len(panel.budgets))
        return [
            [shown(a), *(interval(over_panels(part, a, p)).shown() for p in places)]
            for a in panel.allocators
        ]

    note = NOTE.format(panel.repeats) + "; mean over matrices and layers."
    title = "Cosine to the exact gradient by query budget"
    return Sheet(title, _header(found, "allocator"), _rows(found, line), note)


def _differences(part: Found) -> list[list[str]]:
    panel, lines = part[0][0], []
    for a, b in PAIRS:
        if a in panel.allocators and b in panel.allocators:
            places = range(len(panel.budgets))
            one, other = ([over_panels(part, name, p) for p in places] for name in (a, b))
            cells = [paired(x, y).shown(sign=True) for x, y in zip(one, other, strict=True)]
            gains = [[x - y for x, y in zip(one[i], other[i], strict=True)] for i in (0, -1)]
            growth = [paired(gains[1], gains[0]).shown(sign=True)] if len(places) > 1 else []
            lines.append([f"{shown(a)} - {shown(b)}", *cells, *growth])
    return lines


def differences_sheet(found: Found) -> Sheet:
    """Paired differences of allocators, averaged over matrices and layers."""
    note = NOTE.format(found[0][0].repeats) + (
        ", the differences paired by repeat; mean over matrices and layers. Growth: the "
        "difference at the largest budget minus that at the smallest."
    )
    header = [*_header(found, "difference"), *_growth(found)]
    title = "Paired differences between allocators, over all panels"
    return Sheet(title, header, _rows(found, _differences), note)


def panel_differences_sheet(found: Found) -> Sheet:
    """Paired differences of allocators in every panel."""

    def line(part: Found) -> list[list[str]]:
        lines = []
        for one in part:
            name = f"{shown(one[0].matrix)} of layer {one[0].layer}"
            lines += [[name, *cells] for cells in _differences([one])]
        return lines

    header = [*_header(found, "panel", "difference"), *_growth(found)]
    note = NOTE.format(found[0][0].repeats) + ", the differences paired by repeat."
    title = "Paired differences between allocators, panel by panel"
    return Sheet(title, header, _rows(found, line), note)


def contrasts_sheet(found: Found) -> Sheet | None:
    """Feed-forward against Key, and LR against SPSA; None without a pair to compare."""
    panel, names, rows = found[0][0], stage_names(different(found, "steps")), []
    places = range(len(panel.budgets))
    allocators = [a for a in ("equal", "gaussian") if a in panel.allocators] or panel.allocators

    def add(stage: str, what: str, allocator: str, one: Found, other: Found) -> None:
        if one and other:
            pairs = [[over_panels(x, allocator, p) for x in (one, other)] for p in places]
            cells = [paired(a, b).shown(sign=True) for a, b in pairs]
            rows.append([stage, what, shown(allocator), *cells])

    for steps, stage in names.items():
        here = select(found, steps=steps)
        for allocator in allocators:
            for estimator in different(here, "estimator"):
                mine = select(here, estimator=estimator)
                what = f"feed-forward - Key, {shown(estimator)}"
                pair = (select(mine, matrix="ff"), select(mine, matrix="key"))
                add(stage, what, allocator, *pair)
            for matrix in different(here, "matrix"):
                mine = select(here, matrix=matrix)
                what = f"LR - SPSA, {shown(matrix)}"
                add(
                    stage,
                    what,
                    allocator,
                    select(mine, estimator="lr"),
                    select(mine, estimator="spsa"),
                )
    if not rows:
        return None
    header = ["stage", "difference", "allocator", *(f"{b} queries" for b in panel.budgets)]
    note = NOTE.format(panel.repeats) + ", the differences paired by repeat; mean over layers."
    return Sheet("Matrices and estimators compared", header, rows, note)


def variance_sheet(found: Found) -> Sheet:
    """Variance of each panel, its share, and relative to the squared gradient."""
    panel = found[0][0]
    allocator = "equal" if "equal" in panel.allocators else panel.allocators[0]
    place = _reference(panel.budgets)

    def line(part: Found) -> list[list[str]]:
        noise = [result["noise"][allocator][place] for _, result in part]
        totals = [sum(values) for values in zip(*noise, strict=True)]
        lines = []
        for (one, result), own in zip(part, noise, strict=True):
            share = interval([100 * a / b for a, b in zip(own, totals, strict=True)])
            ratios = [a / b for a, b in zip(own, result["norm"], strict=True)]
            name = f"{shown(one.matrix)} of layer {one.layer}"
            cells = [_scientific(interval(own)), share.shown(1), interval(ratios).shown(1)]
            cosine = interval(result["cosine"][allocator][place]).shown()
            lines.append([name, *cells, cosine])
        return lines

    return Sheet(
        "Variance by matrix and layer",
        ["stage", "estimator", "panel", "variance", "share (%)", "over squared gradient", "cosine"],
        _rows(found, line),
        NOTE.format(panel.repeats)
        + f"; {shown(allocator)} allocation, {panel.budgets[place]} queries per point. Variance: "
        "trace of the covariance of the estimated gradient, estimated from its queries; shares are "
        "of the sum over the panels of a stage and estimator.",
    )


def enough_sheet(found: Found) -> Sheet:
    """Cosine of smaller budgets relative to the largest."""
    panel = found[0][0]

    def line(part: Found) -> list[list[str]]:
        places = range(len(panel.budgets))
        lines = []
        for allocator in panel.allocators:
            values = [interval(over_panels(part, allocator, p)).mean for p in places]
            lines.append([shown(allocator), *(f"{100 * v / values[-1]:.0f}" for v in values)])
        return lines

    title = f"Share (%) of the cosine that {panel.budgets[-1]} queries reach"
    note = "Ratios of means over matrices, layers and repeats."
    return Sheet(title, _header(found, "allocator"), _rows(found, line), note)


def panel_sheets(found: Found) -> tuple[list[Sheet], list[Sheet]]:
    """Tables for the console, and longer ones for the file only."""
    several = len(found[0][0].budgets) > 1
    sheets = [means_sheet(found), differences_sheet(found), contrasts_sheet(found)]
    # The variance of a third is known as a whole, not for each matrix.
    alone = found[0][0].perturb == "matrix"
    sheets += [variance_sheet(found) if alone else None, enough_sheet(found) if several else None]
    return [s for s in sheets if s is not None and s.rows], [panel_differences_sheet(found)]


def _reference(budgets: Sequence[int]) -> int:
    """Index of the budget nearest to the paper's."""
    return min(range(len(budgets)), key=lambda p: abs(budgets[p] - SUFFICE))


def _scientific(value: Interval) -> str:
    return f"{value.mean:.2e}"


def records(found: Found) -> list[Mapping[str, Any]]:
    """Every measured cosine, one per line, for the CSV file."""
    return [
        {
            "steps": panel.steps,
            "estimator": panel.estimator,
            "matrix": panel.matrix,
            "layer": panel.layer,
            "queries": budget,
            "allocator": allocator,
            "repeat": repeat,
            "cosine": value,
            "variance": result["noise"][allocator][place][repeat]
            if panel.perturb == "matrix"
            else "",
            "squared_norm": result["norm"][repeat],
        }
        for panel, result in found
        for place, budget in enumerate(panel.budgets)
        for allocator in panel.allocators
        for repeat, value in enumerate(result["cosine"][allocator][place])
    ]
