"""Fewer queries, more steps: training with the same number of forward equivalents.

The bundled ViT with a new head on the digits, Adam, batches of 64, 5 to 40 queries per point and
group, until the cost of 1000 forward passes of a batch is used up; all costs of a step count. Block
likelihood ratio with the Gaussian allocator, and shaped noise, as configured by `flops finetune`.
Loss and accuracy are those of the validation split at the end, mean over seeds.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.progress import track

from benchmarks import quality
from benchmarks.quality import batch, loss_fn, spread
from flops.tasks.classification import accuracy, bundled_vit, digits
from flops.tasks.data.digits import Splits
from flops.training.methods import Method, engine

QUERIES = (5, 10, 20, 40)
PASSES, SEEDS, RATE = 1000, 2, 1e-3


def trained(data: Splits, method: Method, seed: int, passes: float) -> tuple[int, float, float]:
    """Number of steps, and validation loss and accuracy at the end."""
    model = bundled_vit(seed=seed)
    fg = engine(model, loss_fn, method, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    spent, cost, steps = 0.0, 0.0, 0
    while spent + cost <= passes * quality.BATCH:  # the next step costs about as much as this one
        rows = batch(data.train, 1000 * seed + steps)
        optimizer.zero_grad()
        charged = fg.estimate(*data.train.batch(rows), index=rows).forward_equivalents
        optimizer.step()
        spent, cost = spent + charged, charged - charged.probe  # tracing is done once
        steps += 1
    held = data.validation
    with torch.inference_mode():
        loss = float(loss_fn(model(held.images), held.labels).mean())
    return steps, loss, accuracy(model, held)


def run(passes: float = PASSES, seeds: int = SEEDS) -> dict[str, Any]:
    """Both methods with each number of queries."""
    data = digits()
    methods = {
        f"{name}, {queries} queries": method
        for queries in QUERIES
        for name, method in (
            ("LR, block + Gaussian", Method("ops-lr", queries, targets="block")),
            ("LR, stage, shaped + Gaussian", Method("shaped-lr", queries)),
        )
    }
    results: dict[str, Any] = {}
    for name in track(sorted(methods, key=lambda n: "shaped" in n), "fewer", transient=True):
        found = [trained(data, methods[name], seed, passes) for seed in range(seeds)]
        steps, losses, accuracies = (list(column) for column in zip(*found, strict=True))
        results[name] = {
            "steps": statistics.mean(steps),
            "validation loss": statistics.mean(losses),
            "spread": spread(losses),
            "accuracy": statistics.mean(accuracies),
            "accuracy spread": spread(accuracies),
        }
    return results
