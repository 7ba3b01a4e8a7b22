"""Quality: cosine to the exact gradient for 20 queries per point and group, on the bundled ViT.

Three groups of two layers (first, middle, last third); embeddings and head are groups of their
own and are not counted. Mean over the thirds and over noise seeds, at two stages of training:
with a fresh head, and after a few epochs of backpropagation on the digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from flops import SPSA, Exact, ForwardGradient, Group, LikelihoodRatio
from flops.estimators import Estimator
from flops.tasks.vision import Split, bundled_vit, digits, logits

QUERIES = 20
BATCH = 64
METHODS: dict[str, Estimator] = {
    "LR, block targets": LikelihoodRatio(),
    "LR, leaf targets": LikelihoodRatio(targets="leaf"),
    "LR, stage targets": LikelihoodRatio(targets="stage"),
    "SPSA, independent draws": SPSA(),
    "SPSA, shared draws": SPSA(shared=True),
}


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def thirds(model: Any, estimator: Estimator) -> list[Group]:
    layers = list(model.vit.layers)
    groups = [
        Group(layers[2 * i : 2 * i + 2], estimator, QUERIES, name=f"third {i + 1}")
        for i in range(3)
    ]
    rest = [model.vit.embeddings, model.vit.layernorm, model.classifier]
    return [*groups, Group(rest, Exact(), name="rest")]


def gradient(model: Any, third: int) -> Tensor:
    layers = model.vit.layers[2 * third : 2 * third + 2]
    return torch.cat([p.grad.flatten() for p in layers.parameters()])


def finetuned(train: Split, steps: int, seed: int = 0) -> nn.Module:
    """The bundled model after some steps of backpropagation on the digits."""
    model = bundled_vit(seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(len(train), generator=source)[:BATCH]
        optimizer.zero_grad()
        loss_fn(model(train.images[rows]), train.labels[rows]).mean().backward()
        optimizer.step()
    return model


def cosines(model: Any, x: Tensor, y: Tensor, estimator: Estimator, seeds: Sequence[int]) -> Tensor:
    """Cosine to the exact gradient, (seeds, thirds)."""
    model.zero_grad()
    loss_fn(model(x), y).mean().backward()
    exact = [gradient(model, third) for third in range(3)]
    rows = []
    for seed in seeds:
        model.zero_grad()
        ForwardGradient(model, loss_fn, thirds(model, estimator), seed=seed).estimate(x, y)
        found = [gradient(model, third) for third in range(3)]
        rows.append([F.cosine_similarity(a, b, 0) for a, b in zip(found, exact, strict=True)])
    return torch.tensor(rows)


def run(seeds: int = 20) -> dict[str, Any]:
    """Measure all methods at both stages of training."""
    train = digits().train
    results: dict[str, Any] = {}
    for stage, steps in (("fresh head", 0), ("after 100 steps", 100)):
        model = finetuned(train, steps)
        x, y = train.images[:BATCH], train.labels[:BATCH]
        means = {}
        for name in track(METHODS, description=f"quality, {stage}", transient=True):
            values = cosines(model, x, y, METHODS[name], range(seeds))
            by_seed = values.mean(1).tolist()
            means[name] = statistics.mean(by_seed)
            results[f"{stage}: {name}"] = {
                "cosine": means[name],
                "spread": statistics.stdev(by_seed),
                "thirds": values.mean(0).tolist(),
            }
        block, leaf, shared = (
            means[name] for name in ("LR, block targets", "LR, leaf targets", "SPSA, shared draws")
        )
        results[f"{stage}: block / leaf"] = {"ratio": block / leaf, "target": 2.5}
        results[f"{stage}: leaf / shared SPSA"] = {"ratio": leaf / shared, "target": 3.0}
    return results
