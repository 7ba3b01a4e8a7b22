"""Run the benchmarks: `python -m benchmarks [part ...]`."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flops import PrecisionWarning

PARTS = {
    "quality": "cosine to the exact gradient for 20 queries per point and group",
    "allocation": "J of the allocators over the optimum",
    "gain": "cosine to the exact gradient with each allocator",
    "allocator": "share of a step that an allocator takes",
    "shaping": "what shaped noise adds to a step",
    "vit_base": "one step of a full-size ViT-base, batch 2, 2 queries: time and memory",
    "reuse": "what a query costs with prefix reuse, counted and timed",
}
OUTPUT = Path(__file__).with_name("results.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure FLOPS on the bundled ViT. "
        + " ".join(f"{name}: {text}." for name, text in PARTS.items()),
    )
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where results go, as JSON")
    given = parser.parse_args()
    for name in given.parts:
        if name not in PARTS:
            parser.error(f"unknown part '{name}', choose from {', '.join(PARTS)}")
    # Rounding is part of what is measured; the table shows its effect.
    warnings.simplefilter("ignore", PrecisionWarning)
    console = Console()
    results = {
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        }
    }
    for name in given.parts or PARTS:
        started = time.perf_counter()
        rows = importlib.import_module(f"benchmarks.{name}").run()
        results[name] = rows
        console.print(table(f"{name}: {PARTS[name]}", rows))
        console.print(f"{time.perf_counter() - started:.0f} s\n")
    given.output.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {given.output}")


def table(title: str, rows: dict[str, dict[str, object]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    shown = Table("", *columns, title=title)
    for name, row in rows.items():
        shown.add_row(name, *(_cell(row.get(column)) for column in columns))
    return shown


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return " / ".join(f"{v:.3f}" for v in value)
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
