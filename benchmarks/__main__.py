"""Run the benchmarks: `python -m benchmarks [part ...]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.real import MODELS, ROWS, WHAT
from benchmarks.scale import METHODS
from flops import PrecisionWarning

PARTS = {
    "overhead": "time of a step over that of the minimal computation",
    "reuse": "cost of a query with prefix reuse, counted and timed",
    "memory": "peak memory of a step over inference and over backpropagation",
    "quality": "cosine to the exact gradient with 20 queries, by estimator and allocator",
    "fewer": "training with fewer queries and more steps at equal cost",
    "peers": "comparison with torchzero, torchopt and a plain MeZO loop",
    "compiled": "gain from compiling the layers after the noise",
    "scaling": "rows per second of two processes over those of one, and of two unrelated ones",
    "scale": "simulated data-parallel step of 1 to 1,024 ranks, on SmolLM2-135M and ViT-base",
    "allocation": "J of the allocators over the optimum",
    "gain": "cosine to the exact gradient with each allocator",
    "allocator": "share of an allocator in the time of a step",
    "shaping": "time that shaped noise adds to a step",
    "prompts": "gradients of prompts, and their estimates",
    "rates": "the step size that a `Tuner` finds itself, against a sweep at equal rows",
    "outputs": "what a `Tuner` learns from outputs: Jacobian memory against the mean Jacobian",
    "restart": "seconds to go on with a `Tuner`'s run of 50,000 rows",
    "service": "throughput of `flops serve` under load over that of the model",
    "align": "alignment of the embedded models: loss, accuracy and time by method",
    "align_gradient": "cosine of the adapter's gradient with independent and orthogonal noise",
    "align_cost": "time and memory of a step of alignment, with and without allocator",
    "vit_base": "one step of a full-size ViT-base, batch 2, 2 queries: time and memory",
    "sigma": "cosine with automatic sigma over the best of a sweep, on three models",
    "half": "cosine in half precision by noise scale, over that of single precision",
    "real": "time, first step and memory on SmolLM2-135M and ViT-base beside backpropagation",
    "last_tokens": "where the gradient of SmolLM2 is, and cosines with noise on the last tokens",
    "align_cost_smollm2": "the same with SmolLM2-135M, batch 8; needs `make real-models`",
}
OPTIONS = {  # parts that have each option
    "rows": ("real",),
    "models": ("real", "scale"),
    "steps": ("real", "scale"),
    "methods": ("scale",),
    "what": ("real",),
    "repeats": ("scaling",),
}
OUTPUT = Path(__file__).with_name("results.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure FLOPS on the bundled ViT; prints tables and writes them as JSON.",
        epilog="parts: " + "; ".join(f"{name}: {text}" for name, text in PARTS.items()),
    )
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file for the results")
    parser.add_argument("--threads", type=int, help="number of torch threads; default: torch's own")
    real = parser.add_argument_group("parts 'real' and 'scale'")
    real.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    real.add_argument(
        "--models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS)
    )
    real.add_argument("--steps", type=int, help="steps of a row behind its first")
    real.add_argument(
        "--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS)
    )
    real.add_argument("--what", nargs="+", choices=WHAT, help="memory, time; both by default")
    pairs = parser.add_argument_group("part 'scaling'")
    pairs.add_argument("--repeats", type=int, help="of all measurements; 3 by default")
    given = parser.parse_args()
    chosen = {key: getattr(given, key) for key in OPTIONS}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    for key in chosen:
        if given.parts not in [[part] for part in OPTIONS[key]]:
            parser.error(f"--{key} is for the part {' or '.join(map(repr, OPTIONS[key]))} alone")
    for name in given.parts:
        if name not in PARTS:
            parser.error(f"unknown part '{name}', choose from {', '.join(PARTS)}")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
        os.environ["OMP_NUM_THREADS"] = str(given.threads)  # for parts that start processes
    # Rounding is part of the measurement; the table shows its effect.
    warnings.simplefilter("ignore", PrecisionWarning)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in given.parts or PARTS:
        started = time.perf_counter()
        part = importlib.import_module(f"benchmarks.{name}")
        rows = part.run(**chosen)
        seconds = time.perf_counter() - started
        write(given.output, name, rows, seconds)
        if hasattr(part, "markdown"):
            print(part.markdown(rows))
        else:
            console.print(table(f"{name}: {PARTS[name]}", rows))
        console.print(f"{seconds:.0f} s, written to {given.output}\n")


def write(path: Path, name: str, rows: dict[str, Any], seconds: float) -> None:
    """Write the results of one part with their provenance; keep those of other parts."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = {
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds),
        },
        "rows": rows,
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def table(title: str, rows: dict[str, Any]) -> Table:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    shown = Table("", *columns, title=title)
    for name, row in rows.items():
        shown.add_row(name, *(_cell(row.get(column)) for column in columns))
    return shown


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.0e}"
    if isinstance(value, list):
        return " / ".join(map(_cell, value))
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
