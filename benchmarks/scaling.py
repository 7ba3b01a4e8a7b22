"""Scaling: rows per second of two processes over those of one, one thread each, on one machine.

Two processes run every method in three ways, one after the other: data parallel (each its own batch
of 64), query parallel (both the same batch of 64), and unrelated to each other, which is the limit
of the machine. One process runs it with a batch of 64, before. The FLOPs of one more step are
counted: those of one of two ranks over those of one process are how well the work is divided,
whatever the machine. The 384-wide ViT has the layers of ViT-small (`benchmarks.overhead`), the
other is the bundled one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.overhead import wide_vit
from benchmarks.quality import BATCH, finetuned, loss_fn, thirds
from flops import SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.allocators.base import Allocator
from flops.allocators.equal import Equal
from flops.presets import mezo
from flops.tasks.classification import digits

WARM, STEPS, REPEATS = 2, 4, 3
WAYS = ("data", "query", "unrelated")


@dataclass(frozen=True)
class Case:
    """A method on a model, and the ways that are measured, with the ratio that is wanted."""

    wide: bool
    groups: Callable[[Any], list[Group]]
    allocator: Callable[[], Allocator]
    wanted: dict[str, float]
    many: int = 1  # times as many steps


METHODS: dict[str, tuple[Callable[[Any], list[Group]], Callable[[], Allocator]]] = {
    "block LR": (lambda m: thirds(m, LikelihoodRatio()), Gaussian),
    "leaf LR": (lambda m: thirds(m, LikelihoodRatio(targets="leaf")), Gaussian),
    "shaped stages": (
        lambda m: thirds(m, LikelihoodRatio(targets="stage", shaping=Shaping())),
        Gaussian,
    ),
    "per-point SPSA": (lambda m: thirds(m, SPSA()), Gaussian),
    "MeZO": (mezo, Equal),
}
CASES: dict[str, Case] = {
    "384 wide, block LR": Case(True, *METHODS["block LR"], {"data": 1.85}),
    "384 wide, shaped stages": Case(True, *METHODS["shaped stages"], {"data": 1.8}),
    "384 wide, MeZO": Case(True, *METHODS["MeZO"], {"data": 1.85}, many=3),
    **{
        name: Case(False, *METHODS[name], {"query": 1.75})
        for name in ("block LR", "leaf LR", "per-point SPSA", "shaped stages")
    },
}


def run(repeats: int = REPEATS) -> dict[str, Any]:
    """Ratios of rows per second, the median over the repeats."""
    one: dict[str, list[float]] = {name: [] for name in CASES}
    two: dict[str, dict[str, list[float]]] = {n: {w: [] for w in WAYS} for n in CASES}
    counted: dict[tuple[int, str, str], float] = {}
    for repeat in range(repeats):
        for processes in (1, 2):
            sys.stderr.write(f"scaling: repeat {repeat + 1} of {repeats}, processes: {processes}\n")
            for name, found in launch(processes).items():
                for way, (speed, count) in found.items():
                    (one[name] if processes == 1 else two[name][way]).append(speed)
                    counted[processes, name, way] = count
    results = {}
    for name, case in CASES.items():
        row: dict[str, Any] = {}
        limit = [b / a for a, b in zip(one[name], two[name]["unrelated"], strict=True)]
        for way, wanted in case.wanted.items():
            ratios = [b / a for a, b in zip(one[name], two[name][way], strict=True)]
            row |= {
                "way": way,
                "2 processes / 1": statistics.median(ratios),
                "spread": statistics.stdev(ratios) if repeats > 1 else 0.0,
                "wanted": wanted,
                "limit": statistics.median(limit),
                "over the limit": statistics.median(ratios) / statistics.median(limit),
                "FLOPs of a rank": counted[2, name, way] / counted[1, name, "unrelated"],
            }
        results[name] = {**row, "rows per second, 1 process": statistics.median(one[name])}
    return results


def launch(processes: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Rows per second, and FLOPs of a step, of every method and way, from separate processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "benchmarks.scaling"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, dict[str, tuple[float, float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def work() -> None:
    """Entry point of a measuring process."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    train = digits().train
    small, wide = finetuned(train, 60), wide_vit()
    rates: dict[str, dict[str, tuple[float, float]]] = {}
    for name, case in CASES.items():
        model, ways = wide if case.wide else small, [*case.wanted, "unrelated"]
        chosen = ["unrelated"] if size == 1 else ways
        rates[name] = {way: rate(case, model, train, way, rank) for way in chosen}
    if rank == 0:
        sys.stdout.write(json.dumps(rates) + "\n")
    dist.destroy_process_group()


def settle(fg: ForwardGradient) -> None:
    """End what block and stage targets do in their first eight steps: energies of Jacobians."""
    for memory in fg.memory.values():
        if "jacobian_energy" in memory:
            total, count = memory["jacobian_energy"]
            memory["jacobian_energy"] = (8 * total / count, 8)


def rate(case: Case, model: Any, train: Any, way: str, rank: int) -> tuple[float, float]:
    """Rows per second of all processes together, and the FLOPs of a step of this one."""
    first = rank * BATCH if way == "data" else 0
    rows = torch.arange(first, first + BATCH)
    x, y = train.images[rows], train.labels[rows]
    group: Any = None if way == "unrelated" else "auto"
    parallel: Any = "query" if way == "query" else "data"
    fg = ForwardGradient(
        model,
        loss_fn,
        case.groups(model),
        allocator=case.allocator(),
        process_group=group,
        parallel=parallel,
    )
    done, started = 0, 0.0
    for step in range((WARM + STEPS) * case.many):
        if step == WARM * case.many:
            dist.barrier()
            done, started = 0, time.perf_counter()
        done += fg.estimate(x, y, index=rows).queries
        if step == 0:
            settle(fg)
    own = time.perf_counter() - started  # before the others are waited for
    dist.barrier()
    mine = done / own if way == "unrelated" else done / (time.perf_counter() - started)
    total = torch.tensor([mine if way == "unrelated" or rank == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    with FlopCounterMode(display=False) as counter:
        fg.estimate(x, y, index=rows)
    return float(total), float(counter.get_total_flops())


if __name__ == "__main__":
    work()
