"""Quality: cosine to the exact gradient with 20 queries per point and group, on the bundled ViT.

Every estimator with every allocator (shared draws need equal counts), isotropic and shaped, at two
stages of training: after 20 and after 150 steps of backpropagation on the digits. Three groups of
two layers (first, middle, last third); embeddings and head are separate groups and not counted.
Allocators and shaped noise are trained on 12 batches first, with the same 20 queries and fixed
parameters; then mean over the thirds and over six further batches, the same for all, with the
standard deviation over the batches. Ratios are paired by batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from flops import SPSA, Exact, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Equal, Gaussian, Neyman
from flops.estimators import Estimator
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.warm_starts import finetuned as backpropagated
from flops.tasks.classification import bundled_vit, digits, logits
from flops.tasks.data.digits import Split

QUERIES = 20
BATCH = 64
STAGES = {"early": 20, "near convergence": 150}  # steps of backpropagation before
WARM, SAMPLES = 12, 6


def estimators() -> dict[str, Estimator]:
    found: dict[str, Estimator] = {}
    names: tuple[Targets, ...] = ("leaf", "block", "stage")
    for targets in names:
        found[f"LR, {targets}"] = LikelihoodRatio(targets=targets)
        found[f"LR, {targets}, shaped"] = LikelihoodRatio(targets=targets, shaping=Shaping())
    return {**found, "SPSA, per-point": SPSA(), "SPSA, shared": SPSA(shared=True)}


ALLOCATORS: dict[str, Callable[[], Any]] = {"equal": Equal, "Gaussian": Gaussian, "Neyman": Neyman}
BASE = "LR, leaf + equal"
# Targets: cosine over that of leaf LR with equal counts, by stage.
TARGETS = {
    "LR, stage, shaped + Gaussian": {"early": 5.0, "near convergence": 10.0},
    "LR, block + Gaussian": {"early": 3.0, "near convergence": 5.0},
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
    return backpropagated(bundled_vit(seed=seed), train, steps, batch=BATCH, seed=seed)


def batch(train: Split, seed: int) -> Tensor:
    """Rows of a random batch."""
    return torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:BATCH]


def cosines(
    model: Any, train: Split, estimator: Estimator, allocator: Any, warm: int, samples: int
) -> Tensor:
    """Cosine to the exact gradient after some training batches, (samples, thirds)."""
    fg = ForwardGradient(model, loss_fn, thirds(model, estimator), allocator=allocator)
    learns = not isinstance(allocator, Equal) or getattr(estimator, "shaping", None) is not None
    for step in range(warm if learns else 0):
        rows = batch(train, step)
        fg.estimate(train.images[rows], train.labels[rows], index=rows)
    found = []
    for sample in range(samples):
        rows = batch(train, 10**6 + sample)
        x, y = train.images[rows], train.labels[rows]
        model.zero_grad()
        loss_fn(model(x), y).mean().backward()
        exact = [gradient(model, third) for third in range(3)]
        model.zero_grad()
        fg.estimate(x, y, index=rows)
        pairs = zip((gradient(model, third) for third in range(3)), exact, strict=True)
        found.append([F.cosine_similarity(a, b, 0) for a, b in pairs])
    return torch.tensor(found)


def run(warm: int = WARM, samples: int = SAMPLES) -> dict[str, Any]:
    """All estimators and allocators at both stages."""
    train = digits().train
    methods = {
        f"{name} + {allocator}": (estimator, ALLOCATORS[allocator])
        for name, estimator in estimators().items()
        for allocator in (("equal",) if estimator.shared else ALLOCATORS)
    }
    models = {stage: finetuned(train, steps) for stage, steps in STAGES.items()}
    results: dict[str, Any] = {}
    cells = [(stage, name) for stage in STAGES for name in methods]
    values: dict[tuple[str, str], list[float]] = {}
    for stage, name in track(cells, description="quality", transient=True):
        estimator, allocator = methods[name]
        found = cosines(models[stage], train, estimator, allocator(), warm, samples)
        values[stage, name] = found.mean(1).tolist()
        results[f"{stage}: {name}"] = {
            **summary("cosine", values[stage, name]),
            "thirds": found.mean(0).tolist(),
        }
    for stage in STAGES:
        for name in methods:
            row = results[f"{stage}: {name}"]
            over = [a / b for a, b in zip(values[stage, name], values[stage, BASE], strict=True)]
            row |= {"over leaf + equal": statistics.mean(over), "ratio spread": spread(over)}
            row["target"] = TARGETS.get(name, {}).get(stage)
    return results


def summary(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.mean(values), "spread": spread(values)}


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
