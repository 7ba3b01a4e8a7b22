"""Scaling: rows per second of two processes over those of one (one thread each), on one machine.

Every measurement is a separate run under torchrun: one process with one thread, two processes with
one thread each, one process with two threads; interleaved, several times. All see the same batches
and take the same steps. "Not slower than two threads" compares with the last of the three.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.quality import BATCH, finetuned, loss_fn, thirds
from flops import SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.allocators.base import Allocator
from flops.allocators.equal import Equal
from flops.presets import mezo
from flops.tasks.classification import digits

WARM, STEPS, REPEATS = 9, 6, 3  # block and stage targets measure Jacobians in the first 8
SETUPS = {"1 process": (1, 1), "2 processes": (2, 1), "2 threads": (1, 2)}
METHODS: dict[str, tuple[Callable[[Any], list[Group]], Callable[[], Allocator]]] = {
    "block LR": (lambda m: thirds(m, LikelihoodRatio()), Gaussian),
    "leaf LR": (lambda m: thirds(m, LikelihoodRatio(targets="leaf")), Gaussian),
    "shaped LR": (
        lambda m: thirds(m, LikelihoodRatio(targets="stage", shaping=Shaping())),
        Gaussian,
    ),
    "per-point SPSA": (lambda m: thirds(m, SPSA()), Gaussian),
    "MeZO": (mezo, Equal),
}


def run() -> dict[str, Any]:
    """Ratios of rows per second, the median over the repeats."""
    rates: dict[str, dict[str, list[float]]] = {n: {s: [] for s in SETUPS} for n in METHODS}
    for _ in range(REPEATS):
        for setup, (processes, threads) in SETUPS.items():
            for name, rate in launch(processes, threads).items():
                rates[name][setup].append(rate)
    results = {}
    for name, found in rates.items():
        one, two, threads = (found[setup] for setup in SETUPS)
        ratios = [b / a for a, b in zip(one, two, strict=True)]
        results[name] = {
            "2 processes / 1": statistics.median(ratios),
            "spread": statistics.stdev(ratios),
            "target": 1.7,
            "2 processes / 2 threads": statistics.median(
                b / a for a, b in zip(threads, two, strict=True)
            ),
            "at least": 1.0,
            "rows per second, 1 process": statistics.median(one),
        }
    return results


def launch(processes: int, threads: int) -> dict[str, float]:
    """Rows per second of every method, from separate processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "benchmarks.scaling"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work() -> None:
    """Entry point of a measuring process."""
    dist.init_process_group("gloo")
    train = digits().train
    model = finetuned(train, 60)
    x, y = train.images[:BATCH], train.labels[:BATCH]
    rates = {}
    for name, (groups, allocator) in METHODS.items():
        fg = ForwardGradient(model, loss_fn, groups(model), allocator=allocator())
        many = 10 if name == "MeZO" else 1  # its steps are short
        rows, started = 0, 0.0
        for step in range((WARM + STEPS) * many):
            if step == WARM * many:
                dist.barrier()
                rows, started = 0, time.perf_counter()
            rows += fg.estimate(x, y, index=torch.arange(BATCH)).queries
        dist.barrier()
        rates[name] = rows / (time.perf_counter() - started)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(rates) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
