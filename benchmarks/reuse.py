"""Prefix reuse: time without over time with it, and the forward equivalents of a query.

Three groups of two layers of the bundled ViT. A query should cost 1, 2/3, 1/3 of a forward pass
for leaf targets, 5/6, 1/2, 1/6 for block targets and 2/3, 1/3, 0 for stage targets.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.progress import track

from benchmarks.quality import BATCH, QUERIES, loss_fn
from flops import ForwardGradient, Group, LikelihoodRatio
from flops.tasks.classification import bundled_vit, digits

REPEATS = 5
COSTS = {"leaf": (1, 2 / 3, 1 / 3), "block": (5 / 6, 1 / 2, 1 / 6), "stage": (2 / 3, 1 / 3, 0)}


def run() -> dict[str, Any]:
    """Interleaved repeats after a warm-up; medians."""
    train = digits().train
    x, y = train.images[:BATCH], train.labels[:BATCH]
    model = bundled_vit().requires_grad_(False)
    model.vit.layers.requires_grad_(True)
    layers = list(model.vit.layers)
    results: dict[str, Any] = {}
    for targets, costs in track(COSTS.items(), description="reuse", transient=True):
        estimator = LikelihoodRatio(targets=targets)
        groups = [
            Group(layers[2 * i : 2 * i + 2], estimator, QUERIES, name=f"third {i + 1}")
            for i in range(3)
        ]
        engines = {r: ForwardGradient(model, loss_fn, groups, reuse=r) for r in (False, True)}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(REPEATS + 1):
            for reuse, engine in engines.items():
                started = time.perf_counter()
                report = engine.estimate(x, y)
                if repeat:
                    seconds[reuse].append(time.perf_counter() - started)
        per_group = []
        for i in range(3):
            model.vit.layers.requires_grad_(False)
            for layer in layers[2 * i : 2 * i + 2]:
                layer.requires_grad_(True)
            one = ForwardGradient(model, loss_fn, [groups[i]])
            report = one.estimate(x, y)
            per_group.append(report.forward_equivalents.queries / report.queries)
        model.vit.layers.requires_grad_(True)
        results[f"{targets} targets"] = {
            "seconds without / with": statistics.median(seconds[False])
            / statistics.median(seconds[True]),
            "cost of a query by third": per_group,
            "expected": list(map(float, costs)),
        }
    return results
