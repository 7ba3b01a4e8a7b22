"""Models of real size: time, first step and memory of forward learning beside backpropagation.

SmolLM2-135M (`make real-models`) on 8 sentences of 48 or 128 tokens, and a ViT-base with random
weights on 8 images, in float32, on two threads unless `--threads` or OMP_NUM_THREADS says
otherwise. Every row runs in two processes of its own, one for the time and one for the memory:

    a pass, the first step, 8 steps on two points (likelihood ratio only), later steps

*Time.* Inference passes take turns with the later steps; "passes" is the median of the ratios in
each turn, and ratios to other rows are ratios of passes, so that other load of the machine falls
out. Rows with a reference of their own (MeZO with the plain loop, block LR with its floor: the
same rows without noise and the same local VJPs) have that in the turns, too: "in turn".

*Memory.* Resident, with one arena of malloc and tensors mapped one by one, which is slower.
"growth" is the peak of the steps over what the loaded model takes, "adds" over the peak of an
inference pass; "first adds" is of the first step alone. Steps are plain SGD; Adam would add two
floats for each trained parameter, "Adam". Block LR and shaped stages train the layers, with
embedding, last norm and head frozen, in passes of the batch's size; LoRA trains adapters of all
linear modules of the layers; the others train everything.

*Cost.* "passes of work" are the forward equivalents of a later step over the batch, by the report
of the engine or counted in the same way; "probing" is what the first step was charged beside.

    python -m benchmarks real --models smollm2-128 --rows inference bp shaped --what memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import ENVIRONMENT, highest, reset_peak, resident
from benchmarks.real_models import MODELS, missing
from benchmarks.real_rows import REFERENCES, ROWS, Step, inference, trained
from benchmarks.timing import interleaved, median_and_spread, ratios
from flops import StepReport
from flops.passes.flop_count import WorkMeter

MB = 2**20
WHAT = ("memory", "time")
MEASURED = ("smollm2-48", "smollm2-128", "vit-base")
TIME = {"bp": "time / bp", "bp-lora": "time / bp-lora", "mezo-loop": "time / mezo-loop"}
MEMORY = {"bp": "bp", "bp-lora": "bp-lora"}
COLUMNS = (
    "trained, M",
    "first, s",
    "later, s",
    "passes",
    "first / later",
    "passes of work",
    "probing",
    "growth, MB",
    "adds, MB",
    "first adds, MB",
    "Adam, MB",
    *TIME.values(),
    *(f"{what} / {row}" for row in MEMORY for what in ("growth", "adds")),
    "in turn",
)


def seconds_of(model: str, name: str, steps: int | None = None) -> dict[str, Any]:
    """Time and cost of one row in this process."""
    warnings.simplefilter("ignore")
    problem, row = MODELS[model](), ROWS[name]
    x, y = problem.inputs, problem.targets
    infer, move = inference(problem), row.make(problem)
    infer(x, y)
    reports: list[StepReport | None] = []

    def step() -> None:
        reports.append(move(x, y))

    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    for _ in range(row.settle):
        move(x[:2], y[:2])
    runs: dict[str, Callable[[], Any]] = {"inference": lambda: infer(x, y), "step": step}
    if row.beside is not None:
        reference = REFERENCES[row.beside](problem)
        runs["reference"] = lambda: reference(x, y)
    turns = interleaved(runs, row.steps if steps is None else steps, warm=0)
    later, spread = median_and_spread(turns["step"])
    passes, passes_spread = median_and_spread(ratios(turns["step"], turns["inference"]))
    found = {
        "first, s": first,
        "later, s": later,
        "spread, s": spread,
        "passes": passes,
        "passes spread": passes_spread,
        "first / later": first / later,
        "threads": torch.get_num_threads(),
    }
    if row.beside is not None:
        middle, its_spread = median_and_spread(ratios(turns["step"], turns["reference"]))
        found |= {"in turn": middle, "in turn spread": its_spread, "in turn with": row.beside}
    if reports[0] is not None and reports[-1] is not None:
        found["passes of work"] = reports[-1].forward_equivalents / len(y)
        found["probing"] = reports[0].forward_equivalents.probe / len(y)
    else:
        clean = inference(problem, torch.no_grad)  # inference mode hides products from the meter
        counted = clean if name == "inference" else move
        found["passes of work"] = _work(counted, x, y) / _work(clean, x, y)
    return found


def memory_of(model: str, name: str) -> dict[str, Any]:
    """Memory of one row in this process: of a pass, the first step and a later one."""
    warnings.simplefilter("ignore")
    problem, row = MODELS[model](), ROWS[name]
    x, y = problem.inputs, problem.targets
    infer, move = inference(problem), row.make(problem)
    infer(x[:2], y[:2])
    loaded = resident()
    passing, first = _peak(infer, x, y), _peak(move, x, y)
    for _ in range(row.settle):
        move(x[:2], y[:2])
    later = _peak(move, x, y)
    count = sum(p.numel() for p in trained(problem.model)) if name != "inference" else 0
    return {
        "trained, M": count / 1e6,
        "growth, MB": (max(first, later) - loaded) / MB,
        "adds, MB": (max(first, later) - passing) / MB,
        "first adds, MB": (first - passing) / MB,
        "later adds, MB": (later - passing) / MB,
        "Adam, MB": 8 * count / MB,
    }


def _peak(step: Step, x: Tensor, y: Tensor) -> int:
    """Most bytes that are resident while it runs."""
    reset_peak()
    step(x, y)
    return highest()


def _work(step: Step, x: Tensor, y: Tensor) -> float:
    with WorkMeter(lambda _: None) as meter:
        step(x, y)
    return meter.total


def measure(
    model: str, name: str, steps: int | None = None, what: Sequence[str] = WHAT
) -> dict[str, Any]:
    """Measure one row in processes of its own: one for the memory, one for the time."""
    found: dict[str, Any] = {"load before": os.getloadavg()[0]}
    threads = {"OMP_NUM_THREADS": "2"} | os.environ
    for part in what:
        environment = threads | ENVIRONMENT if part == "memory" else threads
        command = [sys.executable, "-m", "benchmarks.real", part, model, name, str(steps)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
            return {"failed": lines[-1]}
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Add ratios to the rows of one model, where what they are ratios to was measured."""
    done = {name: row for name, row in rows.items() if "failed" not in row}
    for base, column in TIME.items():
        for row in done.values() if "passes" in done.get(base, ()) else ():
            row[column] = row["passes"] / done[base]["passes"]
    for base, label in MEMORY.items():
        for row in done.values() if "adds, MB" in done.get(base, ()) else ():
            for what in ("growth", "adds"):
                row[f"{what} / {label}"] = row[f"{what}, MB"] / done[base][f"{what}, MB"]


def run(
    rows: Sequence[str] = tuple(ROWS),
    models: Sequence[str] = MEASURED,
    steps: int | None = None,
    what: Sequence[str] = WHAT,
) -> dict[str, Any]:
    """All rows of all models, one after the other.

    Args:
        rows: Names of `ROWS`; ratios need "bp", "bp-lora" and "mezo-loop" among them.
        models: Names of `MODELS`.
        steps: Later steps of each row; by default what the row says.
        what: "memory", which other load does not change, "time", or both.
    """
    results: dict[str, Any] = {}
    for model in models:
        if (why := missing(model)) is not None:
            print(f"{model}: not measured: {why}", flush=True)
            results[model] = {"not measured": why}
            continue
        found: dict[str, dict[str, Any]] = {}
        for name in rows:
            found[name] = measure(model, name, steps, what)
            print(f"{model}, {name}: {progress(found[name])}", flush=True)
        compare(found)
        results |= {f"{model}: {name}": row for name, row in found.items()}
    return results


def progress(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    said = []
    if "passes" in row:
        said.append(
            f"first step {row['first, s']:.1f} s, later {row['later, s']:.2f} s, "
            f"{row['passes']:.2f} passes"
        )
    if "adds, MB" in row:
        said.append(f"grows by {row['growth, MB']:.0f} MB, adds {row['adds, MB']:.0f} MB")
    return "; ".join([*said, f"load before {row['load before']:.1f}"])


def markdown(results: dict[str, Any]) -> str:
    """A table for each model."""
    tables: dict[str, list[str]] = {}
    notes: list[str] = []
    for key, row in results.items():
        if "not measured" in row or "failed" in row:
            notes.append(f"{key}: {row.get('not measured') or row['failed']}")
            continue
        model, _, name = key.partition(": ")
        heading = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        cells = [_cell(row.get(column)) for column in COLUMNS]
        tables.setdefault(model, heading).append(f"| {name} | " + " | ".join(cells) + " |")
    legend = [f"{name}: {row.text}" for name, row in ROWS.items()]
    parts = [f"{model}\n\n" + "\n".join(lines) for model, lines in tables.items()]
    return "\n\n".join([*parts, "\n".join([*notes, *legend])])


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


if __name__ == "__main__":
    what, model, name, steps = sys.argv[1:]
    if what == "memory":
        print(json.dumps(memory_of(model, name)))
    else:
        print(json.dumps(seconds_of(model, name, None if steps == "None" else int(steps))))
