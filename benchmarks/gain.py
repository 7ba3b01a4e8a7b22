"""Gain: cosine to the exact gradient by allocator, used as in training.

Default settings, trained on the queries of 12 earlier steps, then one more batch; block targets, 20
queries per point and group, mean over the thirds of the network; the same total number of queries
for all. Ratios are paired by seed, with the standard deviation over seeds.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch.nn.functional as F
from rich.progress import track

from benchmarks.allocation import SEEDS, STAGES, batch
from benchmarks.quality import BATCH, finetuned, gradient, loss_fn, thirds
from flops import ForwardGradient, LikelihoodRatio
from flops.allocators import Bernoulli, Equal, Gaussian, Neyman
from flops.tasks.classification import digits
from flops.tasks.data.digits import Split

WARM = 12


def cosines(model: Any, train: Split, allocator: Any, seed: int) -> float:
    """Mean cosine over the thirds, after some training steps of the allocator."""
    fg = ForwardGradient(
        model, loss_fn, thirds(model, LikelihoodRatio()), allocator=allocator, seed=seed
    )
    for step in range(WARM):
        rows = batch(train, BATCH, 1000 * seed + step)
        fg.estimate(train.images[rows], train.labels[rows], index=rows)
    rows = batch(train, BATCH, 10**6 + seed)
    x, y = train.images[rows], train.labels[rows]
    model.zero_grad()
    loss_fn(model(x), y).mean().backward()
    exact = [gradient(model, third) for third in range(3)]
    model.zero_grad()
    fg.estimate(x, y, index=rows)
    found = [gradient(model, third) for third in range(3)]
    pairs = zip(found, exact, strict=True)
    return statistics.mean(float(F.cosine_similarity(a, b, 0)) for a, b in pairs)


def run() -> dict[str, Any]:
    """Cosines by stage and allocator, and the ratio of Gaussian to equal."""
    train = digits().train
    results: dict[str, Any] = {}
    stages = {"fresh head": 0, **STAGES}
    for stage in track(stages, description="gain", transient=True):
        found: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            model = finetuned(train, stages[stage], seed)
            for name, allocator in (
                ("equal", Equal()),
                ("Bernoulli", Bernoulli()),
                ("Gaussian", Gaussian()),
                ("Gaussian, pilot 4", Gaussian(pilot=4)),
                ("Neyman", Neyman()),
            ):
                found.setdefault(name, []).append(cosines(model, train, allocator, seed))
        ratios = [g / e for g, e in zip(found["Gaussian"], found["equal"], strict=True)]
        results[stage] = {
            **{name: statistics.mean(values) for name, values in found.items()},
            "Gaussian / equal": statistics.mean(ratios),
            "spread": statistics.stdev(ratios),
        }
    return results
