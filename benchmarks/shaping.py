"""Shaping: time that shaped noise adds to a step (B = 64, 20 queries, stage targets).

Both engines estimate the same batches, interleaved, so that other load affects both; medians over
the steps, after the first isotropic ones. The share of the eigendecompositions is their time over
that of a shaped step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.allocation import batch
from benchmarks.quality import BATCH, finetuned, loss_fn, thirds
from flops import ForwardGradient, LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.tasks.classification import digits

WARM, STEPS, REPEATS = 10, 30, 3


@contextmanager
def timed_eigh() -> Iterator[list[float]]:
    """Measure the time spent in eigendecompositions."""
    seconds, original = [0.0], torch.linalg.eigh

    def eigh(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        out = original(*args, **kwargs)
        seconds[0] += time.perf_counter() - started
        return out

    torch.linalg.eigh = eigh
    try:
        yield seconds
    finally:
        torch.linalg.eigh = original


def steps(model: Any, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of isotropic and shaped steps, interleaved, and of the eigendecompositions."""
    train = digits().train
    isotropic, shaped = (
        ForwardGradient(
            model,
            loss_fn,
            thirds(model, LikelihoodRatio(targets="stage", shaping=shaping)),
            allocator=Gaussian(),
            seed=seed,
        )
        for shaping in (None, Shaping())
    )
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    with timed_eigh() as eigh:
        for step in range(WARM + STEPS):
            rows = batch(train, BATCH, 1000 * seed + step)
            x, y = train.images[rows], train.labels[rows]
            plain = isotropic.estimate(x, y, index=rows).seconds
            eigh[0] = 0.0
            longer = shaped.estimate(x, y, index=rows).seconds
            if step >= WARM:
                for values, new in zip(found, (plain, longer, eigh[0]), strict=True):
                    values.append(new)
    return found


def run() -> dict[str, Any]:
    """Medians of each repeat, then their mean and spread."""
    model = finetuned(digits().train, 60)
    rows = [steps(model, seed) for seed in range(REPEATS)]
    plain, longer, eigh = ([statistics.median(row[i]) for row in rows] for i in range(3))
    ratios = [b / a for a, b in zip(plain, longer, strict=True)]
    return {
        "step": {
            "isotropic, s": statistics.mean(plain),
            "shaped, s": statistics.mean(longer),
            "shaped / isotropic": statistics.mean(ratios),
            "spread": statistics.stdev(ratios),
            "target": 1.1,
            "share of eigendecompositions": statistics.mean(
                e / b for e, b in zip(eigh, longer, strict=True)
            ),
        }
    }
