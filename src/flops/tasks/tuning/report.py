"""Table, differences and plot of `flops tune`, in the layout of the paper's prompt tuning table."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from flops.report.intervals import paired
from flops.report.names import method_name
from flops.report.plots import matplotlib_figures, matplotlib_module
from flops.report.table import Sheet
from flops.storage.files import replacing
from flops.tasks.tuning.names import FIXED

Result = Mapping[str, Any]
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan")
HEADS = {"accuracy": "accuracy, %", "loss": "loss"}


class Reported(Protocol):
    """What the table needs to know of a problem."""

    @property
    def title(self) -> str: ...  # noqa: D102

    @property
    def metric(self) -> Literal["accuracy", "loss"]: ...  # noqa: D102

    @property
    def note(self) -> str: ...  # noqa: D102


def run_name(method: str, size: float | None, seed: int) -> str:
    """Folder of a run."""
    if method in FIXED:
        return method
    return f"{method}-{'auto' if size is None else f'{size:g}'}-seed{seed}"


def table(
    problem: Reported, results: Sequence[Result], methods: Sequence[str], price: float | None
) -> Sheet:
    """Metric and cost, mean over the seeds."""
    counts = ["queries", "texts", "requests", "retries"]
    if problem.metric == "loss":
        counts = ["queries", "failed"]
    header = ["method", HEADS[problem.metric], "step size", *counts, "s"]
    header += [] if price is None else ["price"]
    rows = []
    for method in methods:
        runs = [r for r in results if r["method"] == method and r["chosen"]]
        size = runs[0]["step_size"]
        shown = "" if method in FIXED else "searched" if size is None else f"{size:g}"
        digits = ".1f" if problem.metric == "accuracy" else ".4g"
        cells = [method, spread([r[problem.metric] for r in runs], digits), shown]
        for name in counts:
            cells.append(f"{statistics.mean(r[name] for r in runs):,.0f}")
        cells.append(f"{statistics.mean(r['seconds'] for r in runs):.1f}")
        if price is not None:
            paid = 0.0 if method == "bp" else statistics.mean(r["queries"] for r in runs)
            cells.append(f"{paid / 1000 * price:,.2f}")
        rows.append(cells)
    seeds = max(sum(1 for r in results if r["method"] == m and r["chosen"]) for m in methods)
    many = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "1 seed"
    return Sheet(f"{problem.title}, {many}", header, rows, problem.note)


def spread(values: Sequence[float], digits: str = ".1f") -> str:
    """Mean, with the standard deviation if there are several values."""
    mean = f"{statistics.mean(values):{digits}}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{digits}}"


def below_start(problem: Reported, results: Sequence[Result]) -> list[str]:
    """Sentences about methods that are no better than the start."""
    said = []
    fixed = {r["method"]: r for r in results if r["method"] in FIXED}
    for method in dict.fromkeys(r["method"] for r in results if r["method"] not in FIXED):
        runs = [r for r in results if r["method"] == method and r["chosen"]]
        first, last = (
            statistics.mean(r[name] for r in runs) for name in ("start_loss", "last_loss")
        )
        if not any(r.get("steps", 1) for r in runs):
            said.append(
                f"{method} made no step: the budget does not reach the first; raise --budget, or "
                "lower --queries, --batch or --validation"
            )
        elif last >= first:
            best = statistics.mean(r["validation_loss"] for r in runs)
            where = "below" if last > first else "no better than"
            said.append(
                f"{method} ends {where} its start: validation loss {last:.4g}, {first:.4g} at the "
                f"start; the best parameters on the way ({best:.4g}) are kept"
            )
        for name, other in fixed.items():
            mean = statistics.mean(r[problem.metric] for r in runs)
            sign = 1 if problem.metric == "accuracy" else -1
            if sign * mean < sign * other[problem.metric]:
                said.append(
                    f"{method} is worse than {name} on the test points: {problem.metric} "
                    f"{mean:.4g} against {other[problem.metric]:.4g}"
                )
    return said


def differences(problem: Reported, results: Sequence[Result]) -> Sheet | None:
    """Differences paired by seed, with 95 % intervals; None for one seed or one method."""
    by: dict[str, dict[int, float]] = {}
    for r in results:
        if r["chosen"]:
            by.setdefault(r["method"], {})[r["seed"]] = r[problem.metric]
    pairs = [
        ("ops-lr", "lr"),
        ("ops-spsa", "spsa"),
        *(("shaped-lr", m) for m in ("lr", "ops-lr", "spsa", "ops-spsa", "cma-es", "bp")),
        *((m, f) for f in FIXED for m in ("lr", "ops-lr", "ops-spsa", "shaped-lr")),
    ]
    rows = []
    for one, other in pairs:
        if one not in by or other not in by:
            continue
        fixed = by[other] if other not in FIXED else dict.fromkeys(by[one], by[other][0])
        both = sorted(by[one].keys() & fixed.keys())
        if len(both) < 2:
            continue
        gap = paired([by[one][s] for s in both], [fixed[s] for s in both])
        digits = ".1f" if problem.metric == "accuracy" else ".3g"
        rows.append([f"{one} - {other}", f"{gap.mean:+{digits}} ± {gap.half:{digits}}"])
    if not rows:
        return None
    unit = "points" if problem.metric == "accuracy" else "loss"
    title = f"Differences in {problem.metric}"
    return Sheet(title, ["", unit], rows, "Paired by seed, 95 % intervals.")


def plot(problem: Reported, folder: Path, results: Sequence[Result]) -> Path:
    """Plot the validation metric of the reported runs by queries: every seed, and their mean."""
    metric = f"validation_{problem.metric}"
    ticker = matplotlib_module("ticker")
    figure = matplotlib_figures().Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for r in results:
        if r["chosen"] and r["method"] not in FIXED:
            name = run_name(r["method"], r["step_size"], r["seed"])
            written = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            runs.setdefault(r["method"], []).append([json.loads(line) for line in written])
    for number, (method, found) in enumerate(runs.items()):
        ahead = method in ("shaped-lr", "bp")
        colour = {"shaped-lr": "tab:red", "bp": "black"}.get(method, COLOURS[number % len(COLOURS)])
        style = {"color": colour, "zorder": 3 if ahead else 2}
        for lines in found if len(found) > 1 else ():
            values = [line[metric] for line in lines]
            axes.plot([x["asked"] for x in lines], values, alpha=0.25, linewidth=0.8, **style)
        epochs = list(zip(*found, strict=False))  # epochs that all runs completed
        means = [statistics.fmean(x[metric] for x in lines) for lines in epochs]
        asked = [lines[0]["asked"] for lines in epochs]
        width = 2.4 if ahead else 1.8
        axes.plot(asked, means, linewidth=width, label=method_name(method), **style)
    dashes = iter((":", "--", "-."))
    for r in results:
        if r["method"] in FIXED:
            name = method_name(r["method"])
            axes.axhline(r[metric], color="grey", linestyle=next(dashes, ":"), label=name)
    axes.set_xlabel("queries asked", fontsize=11)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.set_ylabel(f"validation {HEADS[problem.metric]}", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    shown = [y for line in axes.lines for y in line.get_ydata()]
    if problem.metric == "loss" and 0 < 10 * min(shown) < max(shown):
        axes.set_yscale("log")
    figure.suptitle("\n".join(textwrap.wrap(problem.title, 62)), fontsize=12)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    path = folder / "validation.png"
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)
    return path
