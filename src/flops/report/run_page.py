"""The report page of runs: settings, curves, cost, queries, gradient quality, environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from flops.report import html
from flops.report.counts import Extreme, QueryCounts
from flops.report.gradient_quality import quality_charts, running_mean
from flops.report.run_record import RunRecord
from flops.report.scales import short
from flops.report.svg import Chart, Curve, bars

COST = "cost in forward equivalents"
SMALL = 48  # side of an image that is shown with sharp pixels
APART = 8.0  # ratio of costs above which their axis is logarithmic


def run_page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several with a comparison."""
    if len(runs) == 1:
        run = runs[0]
        title = f"{_data(run)}: {run.method}"
        return html.page(title, f"Run {run.name}", *_overview(run), *_sections(run, alone=True))
    names = _names(runs)
    parts = [
        "<h2>Comparison</h2>",
        _summary(runs, names),
        _curves(runs, names),
        _differ(runs, names),
    ]
    for slot, (run, name) in enumerate(zip(runs, names, strict=True)):
        key = f'<span class="key s{slot % 8}"></span>'
        parts.append(f'<h2 id="run{slot}">{key}{escape(name)}</h2>')
        parts += [*_overview(run), *_sections(run, alone=False)]
    data = ", ".join(dict.fromkeys(_data(run) for run in runs))
    return html.page(f"{data}: {len(runs)} runs", ", ".join(run.name for run in runs), *parts)


def duration(seconds: float) -> str:
    """A time for people: 42 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def _data(run: RunRecord) -> str:
    return str(run.settings.get("data", "run")).rstrip("/").rsplit("/", 1)[-1]


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Names that differ: the methods, with the folders if two runs share one."""
    methods = [run.method for run in runs]
    return [
        method if methods.count(method) == 1 else f"{method} ({run.name})"
        for run, method in zip(runs, methods, strict=True)
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _overview(run: RunRecord) -> list[str]:
    """Problems, and the numbers of the last evaluation and step."""
    shown: list[tuple[str, str]] = []
    if run.evaluations:
        last = run.evaluations[-1]
        shown.append(("validation accuracy", _percent(last["accuracy"])))
        if run.test is not None:
            shown.append(("test accuracy", _percent(run.test)))
        if last["loss"] is not None:
            shown.append(("validation loss", f"{last['loss']:.4g}"))
    if run.steps:
        last = run.steps[-1]
        shown.append(("steps", f"{last['step']:,}"))
        if isinstance(last.get("epoch"), int | float):
            shown.append(("epochs", f"{last['epoch']:.3g}"))
        shown.append(("queries", short(last.get("queries") or 0)))
        shown.append(("forward equivalents", short(last["forward_equivalents"])))
        shown.append(("time of the steps", duration(last["seconds"])))
    memory = run.result.get("peak_memory")
    if isinstance(memory, int) and memory:
        shown.append(("peak memory", f"{memory / 2**20:,.0f} MB"))
    return [*map(html.warning, run.problems), html.tiles(shown) if shown else ""]


def _sections(run: RunRecord, alone: bool) -> list[str]:
    level = "h2" if alone else "h3"
    curves = _curves([run], ["training loss"]) if alone else ""
    quality = quality_charts(run)
    spent = _spent(run)
    found = [
        f"<{level}>Curves</{level}>{curves}" if curves else "",
        f"<{level}>Where the queries went</{level}>{_queries(run.counts)}"
        if run.counts is not None and run.counts.seen.sum()
        else "",
        f'<{level}>Gradient quality by group</{level}><div class="charts">{"".join(quality)}</div>'
        if quality
        else "",
        f'<{level}>Cost</{level}><div class="columns">{spent}</div>' if spent else "",
        f"<{level}>Settings</{level}>{html.setting_table(run.settings)}",
        html.environment_table(run.environment),
    ]
    return found


def _curves(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Accuracy and losses against cost, steps and time."""
    alone = len(runs) == 1
    costs = [r.steps[-1]["forward_equivalents"] for r in runs if r.steps]
    log = bool(costs) and min(costs) > 0 and max(costs) > APART * min(costs)
    chance = {r.chance for r in runs}
    level = next(iter(chance)) if len(chance) == 1 else None
    levels = {} if level is None else {f"chance, {level:.0%}": 100 * level}
    labels = ["validation accuracy"] if alone else list(names)

    def accuracy(x: str) -> list[Curve]:
        return [
            Curve(label, _points(run.evaluations, x, "accuracy", 100), slot, marked=True)
            for slot, (run, label) in enumerate(zip(runs, labels, strict=True))
        ]

    losses = []
    for slot, (run, label) in enumerate(zip(runs, names, strict=True)):
        points = _points(run.steps, "step", "loss")
        kept = [p for p in points if math.isfinite(p[1])]
        if alone:
            losses.append(Curve("each step", points, slot, faint=True))
        losses.append(Curve(label, running_mean(kept, max(1, min(20, len(kept) // 20))), slot))
    if alone:
        held = _points(runs[0].evaluations, "step", "loss")
        losses.append(Curve("validation loss", held, 1, marked=True))
    charts = [
        Chart(
            "Accuracy against cost",
            COST,
            "validation accuracy, %",
            accuracy("forward_equivalents"),
            levels,
            log_x=log,
        ),
        Chart(
            "Accuracy against time",
            "time of the steps, s",
            "validation accuracy, %",
            accuracy("seconds"),
            levels,
            log_x=log,
        ),
        Chart("Loss" if alone else "Training loss", "step", "loss", losses),
    ]
    drawn = "".join(chart.html() for chart in charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _points(
    lines: Sequence[dict[str, Any]], x: str, y: str, factor: float = 1.0
) -> list[tuple[float, float]]:
    return [
        (float(line[x]), math.nan if line[y] is None else factor * float(line[y]))
        for line in lines
        if line[x] is not None
    ]


def _summary(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    header = ["run", "validation", "test", "steps", "queries", "forward eq.", "time", "memory"]
    rows = []
    for run, name in zip(runs, names, strict=True):
        last, end = (lines[-1] if lines else {} for lines in (run.evaluations, run.steps))
        memory = run.result.get("peak_memory")
        rows.append(
            [
                name,
                _percent(last.get("accuracy")),
                _percent(run.test),
                f"{end['step']:,}" if end else "-",
                short(end.get("queries") or 0) if end else "-",
                short(end["forward_equivalents"]) if end else "-",
                duration(end["seconds"]) if end else "-",
                f"{memory / 2**20:,.0f} MB" if isinstance(memory, int) and memory else "-",
            ]
        )
    return html.table(header, rows) + "<br>"


def _differ(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Settings in which the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output")
    rows = []
    for key in keys:
        values = [html.shown_value(run.settings.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return ""
    return "<h3>Settings that differ</h3>" + html.table(["setting", *names], rows)


def _queries(counts: QueryCounts) -> str:
    title = counts.title[0].upper() + counts.title[1:]
    seen = counts.seen.numpy()
    low, high = int(seen.min()), int(seen.max())
    width = -(-(high - low + 1) // 30)  # whole numbers: else some bars hold more of them
    edges = (
        np.geomspace(low, high, 31)
        if high > 10 * low > 0
        else np.arange(low, high + width + 1, width) - 0.5
    )
    heights, _ = np.histogram(seen, edges)
    label = f"queries per {counts.kind} at its last visit, all groups"
    drawn = bars(title, label, f"number of {counts.kind}s", edges.tolist(), heights.tolist())
    shown = [
        f"<div><h3>{counts.kind.capitalize()}s with {name} queries</h3>{_extreme(extreme)}</div>"
        for name, extreme in (("most", counts.most), ("fewest", counts.least))
        if extreme.counts and (extreme.images is not None or extreme.texts) and low < high
    ]
    return f'<div class="columns">{drawn}{"".join(shown)}</div>'


def _extreme(extreme: Extreme) -> str:
    names = extreme.names or ("",) * len(extreme.counts)
    if extreme.images is None:
        rows = [[str(c), t] for c, t in zip(extreme.counts, extreme.texts, strict=False)]
        return html.table(["queries", "text"], rows, "texts")
    sharp = "" if extreme.images.shape[-1] <= SMALL else " smooth"
    found = [
        f'<li><img alt="{escape(name)}" src="{html.image_source(image)}"><b>{count}</b> '
        f"{escape(name)}</li>"
        for image, count, name in zip(extreme.images, extreme.counts, names, strict=True)
    ]
    return f'<ul class="thumbs{sharp}">{"".join(found)}</ul>'


def _spent(run: RunRecord) -> str:
    """Cost by part, and queries by group."""
    found = ""
    if not run.steps:
        return found
    parts = run.steps[-1].get("parts")
    if isinstance(parts, dict) and (total := sum(parts.values())):
        rows = [[n, short(v), f"{v / total:.0%}"] for n, v in parts.items() if v]
        found += html.table(["part", "forward equivalents", "share"], rows)
    queries: dict[str, int] = {}
    for line in run.steps:
        for group, count in (line.get("group_queries") or {}).items():
            queries[group] = queries.get(group, 0) + count
    if total := sum(queries.values()):
        rows = [[group, short(n), f"{n / total:.0%}"] for group, n in queries.items()]
        found += html.table(["group", "queries", "share"], rows)
    return found
