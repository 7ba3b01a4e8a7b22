"""Half precision: cosine to the exact gradient by noise scale, for block LR on the bundled ViT.

Three groups of two layers, 20 queries per point and group, after 40 steps of backpropagation on the
digits. The model's weights are rounded to each type; the exact gradient is that of the rounded
weights in single precision. Mean over five seeds of the noise on one batch of 32, with its standard
deviation, and over the cosine of single precision with its default. The row "default" leaves sigma
out.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks.quality import loss_fn
from flops import ForwardGradient, Group, LikelihoodRatio
from flops.experiments.warm_starts import finetuned
from flops.tasks.classification import bundled_vit, digits

QUERIES, BATCH, STEPS, SEEDS = 20, 32, 40, 5
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIGMAS = (None, 1e-3, 1e-2, 3e-2, 6e-2, 1e-1, 2e-1)


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.vit.layers.parameters()])


def cosines(model: Any, sigma: float | None, x: Tensor, y: Tensor) -> list[float]:
    wide = copy.deepcopy(model).float()
    loss_fn(wide(x.float()), y).mean().backward()
    truth, layers, found = gradient(wide), list(model.vit.layers), []
    third = len(layers) // 3
    estimator = LikelihoodRatio(sigma)
    groups = [
        Group(layers[i * third : (i + 1) * third], estimator, QUERIES, name=str(i))
        for i in range(3)
    ]
    for seed in range(SEEDS):
        model.zero_grad()
        ForwardGradient(model, loss_fn, groups, seed=seed).estimate(x, y)
        found.append(float(F.cosine_similarity(gradient(model), truth, dim=0)))
    return found


def run() -> dict[str, Any]:
    torch.manual_seed(0)
    data = digits()
    start = finetuned(bundled_vit(classes=10), data.train, STEPS)
    start.requires_grad_(False)
    start.vit.layers.requires_grad_(True)
    x, y = data.train.images[:BATCH], data.train.labels[:BATCH]
    rows: dict[str, Any] = {}
    base = 0.0
    cases = [(name, sigma) for name in TYPES for sigma in SIGMAS]
    for name, sigma in track(cases, description="half"):
        model = copy.deepcopy(start).to(TYPES[name])
        found = cosines(model, sigma, x.to(TYPES[name]), y)
        mean = statistics.mean(found)
        base = base or mean
        rows[f"{name}, {'default' if sigma is None else f'{sigma:g}'}"] = {
            "cosine": mean,
            "standard deviation": statistics.stdev(found),
            "over single precision": mean / base,
        }
    return rows
