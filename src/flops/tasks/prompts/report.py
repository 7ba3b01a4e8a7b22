"""Table, differences and plot of `flops tune`, in the layout of the paper's prompt tuning table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flops.optional import require
from flops.report.intervals import paired
from flops.report.table import Sheet
from flops.storage.files import replacing

Result = Mapping[str, Any]


def table(results: Sequence[Result], methods: Sequence[str], price: float | None) -> Sheet:
    """Accuracy and cost, mean over the seeds."""
    header = ["method", "accuracy, %", "step size", "queries", "texts", "requests", "retries", "s"]
    header += [] if price is None else ["price"]
    rows = []
    for method in methods:
        runs = [r for r in results if r["method"] == method and r["chosen"]]
        size = "" if method == "manual" else f"{runs[0]['step_size']:g}"
        cells = [method, spread([r["accuracy"] for r in runs]), size]
        for name in ("queries", "texts", "requests", "retries"):
            cells.append(f"{statistics.mean(r[name] for r in runs):,.0f}")
        cells.append(f"{statistics.mean(r['seconds'] for r in runs):.1f}")
        if price is not None:
            paid = 0.0 if method == "bp" else statistics.mean(r["queries"] for r in runs)
            cells.append(f"{paid / 1000 * price:,.2f}")
        rows.append(cells)
    seeds = max(sum(1 for r in results if r["method"] == m and r["chosen"]) for m in methods)
    note = (
        "Test accuracy of the prompts with the best validation loss. Queries: rows charged, "
        "validation and test included; texts: class texts that the service encoded. Both exclude "
        "the runs that chose step sizes. bp runs a local model."
    )
    many = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "1 seed"
    return Sheet(f"Black-box prompt tuning, {many}", header, rows, note)


def spread(values: Sequence[float]) -> str:
    """Mean, with the standard deviation if there are several values."""
    mean = statistics.mean(values)
    return f"{mean:.1f}" if len(values) < 2 else f"{mean:.1f} ± {statistics.stdev(values):.1f}"


def differences(results: Sequence[Result]) -> Sheet | None:
    """Differences paired by seed, with 95 % intervals; None for one seed or one method."""
    by: dict[str, dict[int, float]] = {}
    for r in results:
        if r["chosen"]:
            by.setdefault(r["method"], {})[r["seed"]] = r["accuracy"]
    pairs = [
        ("ops-lr", "lr"),
        ("ops-spsa", "spsa"),
        *(("shaped-lr", m) for m in ("lr", "ops-lr", "spsa", "ops-spsa", "cma-es", "bp")),
        *((m, "manual") for m in ("lr", "ops-lr", "ops-spsa", "shaped-lr")),
    ]
    rows = []
    for one, other in pairs:
        if one not in by or other not in by:
            continue
        fixed = by[other] if other != "manual" else dict.fromkeys(by[one], by[other][0])
        both = sorted(by[one].keys() & fixed.keys())
        if len(both) < 2:
            continue
        gap = paired([by[one][s] for s in both], [fixed[s] for s in both])
        rows.append([f"{one} - {other}", f"{gap.mean:+.1f} ± {gap.half:.1f}"])
    if not rows:
        return None
    return Sheet("Differences in accuracy", ["", "points"], rows, "Paired by seed, 95 % intervals.")


def plot(folder: Path, results: Sequence[Result]) -> Path:
    """Plot the validation accuracy of the reported runs by queries."""
    matplotlib = require("matplotlib", "plots")
    matplotlib.use("Agg")
    figure = require("matplotlib.figure", "plots").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for r in results:
        if r["chosen"] and r["method"] != "manual":
            name = f"{r['method']}-{r['step_size']:g}-seed{r['seed']}"
            written = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            runs.setdefault(r["method"], []).append([json.loads(line) for line in written])
    for number, (method, found) in enumerate(runs.items()):
        for lines in found:
            values = [line["validation_accuracy"] for line in lines]
            axes.plot([x["asked"] for x in lines], values, color=f"C{number}", alpha=0.2)
        epochs = list(zip(*found, strict=False))  # epochs that all runs completed
        means = [statistics.fmean(x["validation_accuracy"] for x in lines) for lines in epochs]
        asked = [lines[0]["asked"] for lines in epochs]
        axes.plot(asked, means, color=f"C{number}", linewidth=2, label=method)
    for r in results:
        if r["method"] == "manual":
            axes.axhline(r["validation_accuracy"], color="grey", linestyle=":", label="manual")
    axes.set_xlabel("queries")
    axes.set_ylabel("validation accuracy, %")
    axes.legend(frameon=False)
    path = folder / "validation.png"
    with replacing(path, durable=False) as scratch:
        figure.savefig(scratch, dpi=150)
    return path
