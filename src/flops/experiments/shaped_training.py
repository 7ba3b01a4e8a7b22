"""One fine-tuning run of the bundled ViT on the digits, with cosines to the exact gradient.

Three stages of two layers each, frozen embeddings, the head (layer norm and classifier) as another
stage with isotropic noise, Adam. The exact gradient of a batch is backpropagated at the same
parameters; the cosine is over all parameters of a third.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flops import presets
from flops.allocators import Allocator, Equal, Gaussian, Neyman
from flops.engine.auto_groups import default_groups
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.engine.report import StepReport
from flops.errors import PrecisionWarning
from flops.estimators import LikelihoodRatio
from flops.estimators.likelihood_ratio import Targets
from flops.subspace.config import Shaping
from flops.tasks.classification.metrics import accuracy, logits
from flops.tasks.data.digits import Split, digits
from flops.tasks.models.vit import bundled_vit
from flops.training.device import find_device

THIRDS = ("first third", "middle third", "last third")
ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "gaussian": lambda: Gaussian("standardised"),  # that of the defaults
    "tanh": Gaussian,
    "neyman": Neyman,
    "equal": Equal,
}


@dataclass(frozen=True)
class TrainingRun:
    """Settings of one run.

    Attributes:
        method: "shaped" or "isotropic" noise in thirds, "default" (nothing set), "fixed" (the same
            with a number of queries), "paper", or "backpropagation".
        targets: What likelihood ratio perturbs.
        queries: Mean queries per point and stage.
        epochs: Epochs.
        batch: Batch size.
        learning_rate: Learning rate of Adam.
        allocator: Allocator of all groups: "gaussian" (of standardised losses, as by default),
            "tanh" (the paper's Gaussian), "neyman" or "equal".
        explore: Share of isotropic queries; None to adapt it.
        unbiased: The unbiased option of shaped noise.
        outputs: Whether shaped noise learns from the outputs, or from losses alone.
        frozen: Whether the embeddings stay as they are.
        curve: Whether to evaluate on the validation split after every epoch.
        follow: Whether updates follow the estimate, or the exact gradient, so that runs with
            different settings see the same parameters and batches.
        every: Steps between two cosines; 0 for none.
        test: Whether to evaluate on the test split, once, after the last step.
        most: Largest number of steps; None for all of the epochs.
        seed: Seed of the new head, the order of the batches and the noise.
        device: cpu, cuda, or auto.
    """

    method: str = "shaped"
    targets: Targets = "stage"
    queries: int = 20
    epochs: int = 5
    batch: int = 64
    learning_rate: float = 1e-3
    allocator: str = "gaussian"
    explore: float | None = None
    unbiased: bool = False
    outputs: bool = True
    frozen: bool = True
    curve: bool = False
    follow: Literal["estimate", "exact"] = "estimate"
    every: int = 4
    test: bool = False
    most: int | None = None
    seed: int = 0
    device: str = "auto"


def train(settings: TrainingRun) -> dict[str, Any]:
    """Train; return cosines and explained variances by step, losses, accuracies and cost."""
    splits, model = digits(), bundled_vit(seed=settings.seed)
    device = find_device(settings.device)
    model.to(device)
    model.vit.embeddings.requires_grad_(not settings.frozen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, settings.learning_rate)
    fg = None if settings.method == "backpropagation" else _engine(model, settings)
    steps, cosines, explained, losses, curve = [], [], [], [], []
    cost, queries, started = 0.0, 0, time.perf_counter()
    epoch = -(-len(splits.train) // settings.batch)
    for step, rows in enumerate(_batches(len(splits.train), settings)):
        if settings.curve and step % epoch == 0:
            curve.append((cost, accuracy(model, splits.validation)))
        x, y = splits.train.images[rows].to(device), splits.train.labels[rows].to(device)
        look = settings.every > 0 and step % settings.every == 0
        exact = None
        if fg is None or look or settings.follow == "exact":
            optimizer.zero_grad()
            loss = loss_fn(model(x), y).mean()
            loss.backward()
            exact = [p.grad for p in trainable]
        if fg is None:
            losses.append(float(loss.detach()))
            cost += 3 * len(rows)
        else:
            truth = _thirds(model) if look else []
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecisionWarning)  # rounding is part of the study
                report = fg.estimate(x, y, index=rows)
            losses.append(report.loss)
            cost += report.forward_equivalents
            queries += report.queries
            if look:
                steps.append(step)
                pairs = zip(_thirds(model), truth, strict=True)
                cosines.append([float(F.cosine_similarity(a, b, 0)) for a, b in pairs])
                explained.append([_explained(report, name) for name in THIRDS])
            if settings.follow == "exact" and exact is not None:
                for p, gradient in zip(trainable, exact, strict=True):
                    p.grad = gradient
        optimizer.step()
    right = accuracy(model, splits.validation)
    return {
        "steps": steps,
        "cosines": cosines,
        "captured": explained,  # name in saved results of earlier versions
        "losses": losses,
        "validation": right,
        "curve": [*curve, (cost, right)] if settings.curve else [],
        "validation loss": _mean_loss(model, splits.validation),
        "test": accuracy(model, splits.test) if settings.test else None,
        "forward equivalents": cost,
        "queries": queries,
        "seconds": time.perf_counter() - started,
    }


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of each point."""
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def _explained(report: StepReport, name: str) -> float:
    """Explained variance of a group; 0 without shaped noise."""
    found = report.shaping.get(name)
    return 0.0 if found is None else found.explained_variance


def _engine(model: Any, settings: TrainingRun) -> ForwardGradient:
    if settings.method == "default":
        return ForwardGradient(model, loss_fn, seed=settings.seed)
    if settings.method == "fixed":
        groups = [
            replace(group, queries=settings.queries)
            for group in default_groups(dict(model.named_modules()))
        ]
        allocator = ALLOCATORS[settings.allocator]()
        return ForwardGradient(model, loss_fn, groups, allocator=allocator, seed=settings.seed)
    if settings.method == "paper":
        groups = presets.paper(model, queries=settings.queries)
        return ForwardGradient(model, loss_fn, groups, allocator=Gaussian(), seed=settings.seed)
    shaping = Shaping(
        explore=settings.explore, unbiased=settings.unbiased, outputs=settings.outputs
    )
    shaped = settings.method == "shaped"
    estimator = LikelihoodRatio(targets=settings.targets, shaping=shaping if shaped else None)
    layers, head = list(model.vit.layers), [model.vit.layernorm, model.classifier]
    groups = [
        Group(layers[2 * i : 2 * i + 2], estimator, settings.queries, name=THIRDS[i])
        for i in range(3)
    ]
    groups.append(Group(head, LikelihoodRatio(targets="stage"), settings.queries, name="head"))
    allocator = ALLOCATORS[settings.allocator]()
    return ForwardGradient(model, loss_fn, groups, allocator=allocator, seed=settings.seed)


def _batches(size: int, settings: TrainingRun) -> list[Tensor]:
    source = torch.Generator().manual_seed(settings.seed)
    found = [
        rows
        for _ in range(settings.epochs)
        for rows in torch.randperm(size, generator=source).split(settings.batch)
    ]
    return found[: settings.most]


def _thirds(model: Any) -> list[Tensor]:
    """Gradient of each third, as one vector."""
    layers = model.vit.layers
    return [
        torch.cat([p.grad.flatten() for p in layers[2 * i : 2 * i + 2].parameters()])
        for i in range(3)
    ]


def _mean_loss(model: Any, split: Split) -> float:
    with torch.inference_mode():
        device = next(model.parameters()).device
        loss = float(loss_fn(model(split.images.to(device)), split.labels.to(device)).mean())
    return loss if math.isfinite(loss) else 1e30  # JSON has no infinity


def cost_to_reach(result: dict[str, Any], wanted: float) -> float | None:
    """Forward equivalents until the validation accuracy, as the mean of two epochs, is reached.

    None if it never is.
    """
    for (_, before), (cost, now) in itertools.pairwise(result["curve"]):
        if (before + now) / 2 >= wanted:
            return float(cost)
    return None


def steps_above(result: dict[str, Any], third: int, least: float) -> int | None:
    """First measured step whose cosine, and the next, are above a value; None if there is none."""
    above = [row[third] > least for row in result["cosines"]]
    both = [a and b for a, b in itertools.pairwise(above)]
    return int(result["steps"][both.index(True)]) if any(both) else None


def mean_cosines(result: dict[str, Any], start: int) -> list[float]:
    """Mean cosine of each third over the measured steps from ``start`` on."""
    late = [c for step, c in zip(result["steps"], result["cosines"], strict=True) if step >= start]
    return [statistics.fmean(column) for column in zip(*late, strict=True)]
