"""Five other problems for shaped noise, some of them adversarial.

- `mlp`: digits with a perceptron of two hidden layers.
- `cnn`: digits with three convolutions.
- `random labels`: random labels with as many classes as the hidden layers have channels: the
  gradient has full rank at the site.
- `abrupt change`: halfway all labels change to classes that did not occur before, so the gradient
  leaves the learned subspace.
- `sequences`: a small transformer encoder; lengths vary within a batch (padding is masked) and
  from batch to batch.

Both arms, shaped and isotropic, estimate the gradient of the same batch at the same parameters;
updates follow the exact gradient, so that errors of one arm do not affect the other.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flops.allocators import Gaussian
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import PrecisionWarning
from flops.estimators import LikelihoodRatio
from flops.subspace.config import Shaping
from flops.tasks.data.digits import digits
from flops.training.device import find_device

BATCH = 64
HIDDEN = 64
WORDS, CLASSES, LONGEST = 24, 4, 24


@dataclass(frozen=True)
class Comparison:
    """Settings of one run.

    Attributes:
        problem: A key of `PROBLEMS`.
        queries: Mean queries per point and group.
        steps: Training steps.
        learning_rate: Learning rate of Adam.
        seed: Seed of model, data and noise.
        device: cpu, cuda, or auto.
    """

    problem: str
    queries: int = 8
    steps: int = 80
    learning_rate: float = 3e-3
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class Problem:
    """A model in stages, each its own group, and batches (inputs, targets, index) by step."""

    model: nn.Module
    stages: Sequence[Sequence[nn.Module]]
    batch: Callable[[int], tuple[Any, Tensor, Tensor]]


def compare(settings: Comparison) -> dict[str, Any]:
    """Cosines of both arms per step, averaged over the groups."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # for torch's initialisation
        task = PROBLEMS[settings.problem](settings)
    device = find_device(settings.device)
    task.model.to(device).eval()
    engines = {"shaped": _engine(task, settings, True), "isotropic": _engine(task, settings, False)}
    optimizer = torch.optim.Adam(
        [p for p in task.model.parameters() if p.requires_grad], settings.learning_rate
    )
    groups = [[p for m in stage for p in m.parameters()] for stage in task.stages]
    cosines: dict[str, list[list[float]]] = {name: [] for name in engines}
    losses, started = [], time.perf_counter()
    for step in range(settings.steps):
        inputs, targets, index = task.batch(step)
        inputs, targets = tree_map(lambda x: x.to(device), (inputs, targets))
        optimizer.zero_grad()
        outputs = task.model(**inputs) if isinstance(inputs, dict) else task.model(inputs)
        loss = _losses(outputs, targets).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        exact = [[p.grad for p in group] for group in groups]
        for name, fg in engines.items():
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", PrecisionWarning
                )  # small losses are subject to rounding
                fg.estimate(inputs, targets, index=index)
            found = [[p.grad for p in group] for group in groups]
            cosines[name].append([_cosine(a, b) for a, b in zip(found, exact, strict=True)])
        for group, gradients in zip(groups, exact, strict=True):
            for p, gradient in zip(group, gradients, strict=True):
                p.grad = gradient
        optimizer.step()
    return {**cosines, "losses": losses, "seconds": time.perf_counter() - started}


def mean_cosine(result: dict[str, Any], arm: str, start: int) -> float:
    """Mean cosine of an arm over groups and over the steps from ``start`` on."""
    late = [statistics.fmean(row) for row in result[arm][start:]]
    return statistics.fmean(late)


def _engine(task: Problem, settings: Comparison, shaped: bool) -> ForwardGradient:
    estimator = LikelihoodRatio(targets="stage", shaping=Shaping() if shaped else None)
    groups = [
        Group(stage, estimator, settings.queries, name=f"stage {number + 1}")
        for number, stage in enumerate(task.stages)
    ]
    return ForwardGradient(task.model, _losses, groups, allocator=Gaussian(), seed=settings.seed)


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _cosine(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> float:
    a, b = (torch.cat([g.flatten() for g in side if g is not None]) for side in (found, exact))
    return float(F.cosine_similarity(a, b, 0))


def _perceptron(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU()),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
        nn.Linear(HIDDEN, classes),
    )


def _on_digits(
    model: nn.Sequential, settings: Comparison, relabel: Callable[[Tensor, Tensor, int], Tensor]
) -> Problem:
    train = digits(size=8).train
    source = torch.Generator().manual_seed(settings.seed)
    orders = [torch.randperm(len(train), generator=source) for _ in range(settings.steps)]

    def batch(step: int) -> tuple[Any, Tensor, Tensor]:
        rows = orders[step][:BATCH]
        return train.images[rows], relabel(train.labels[rows], rows, step), rows

    return Problem(model, [[stage] for stage in model], batch)


def _mlp(settings: Comparison) -> Problem:
    return _on_digits(_perceptron(10), settings, lambda labels, rows, step: labels)


def _cnn(settings: Comparison) -> Problem:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
    )
    return _on_digits(model, settings, lambda labels, rows, step: labels)


def _random_labels(settings: Comparison) -> Problem:
    drawn = torch.randint(HIDDEN, (2000,))
    return _on_digits(_perceptron(HIDDEN), settings, lambda labels, rows, step: drawn[rows])


def _abrupt(settings: Comparison) -> Problem:
    def relabel(labels: Tensor, rows: Tensor, step: int) -> Tensor:
        return labels if step < settings.steps // 2 else 19 - labels

    return _on_digits(_perceptron(20), settings, relabel)


class Reader(nn.Module):
    """Word and position embeddings (frozen), two encoder layers, mean over unmasked words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.words.requires_grad_(False)
        self.places.requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits from words (B, T) and their mask (B, T)."""
        x = self.words(input_ids) + self.places(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        real = attention_mask.unsqueeze(2).to(x)
        logits: Tensor = self.head((x * real).sum(1) / real.sum(1))
        return logits


def _sequences(settings: Comparison) -> Problem:
    """Predict which of the first four words of the vocabulary is the most frequent."""
    source = torch.Generator().manual_seed(settings.seed)
    model = Reader()

    def batch(step: int) -> tuple[Any, Tensor, Tensor]:
        longest = int(torch.randint(10, LONGEST + 1, (), generator=source))
        lengths = torch.randint(4, longest + 1, (BATCH, 1), generator=source)
        lengths[0] = longest
        words = torch.randint(WORDS, (BATCH, longest), generator=source)
        # About every second word is one of the four, with point-dependent probabilities.
        odds = torch.rand(BATCH, CLASSES, generator=source) ** 3
        marked = torch.multinomial(odds, longest, replacement=True, generator=source)
        words = torch.where(torch.rand(words.shape, generator=source) < 0.5, marked, words)
        mask = (torch.arange(longest) < lengths).long()
        counts = torch.stack([((words == c) & (mask == 1)).sum(1) for c in range(CLASSES)], 1)
        return (
            {"input_ids": words * mask, "attention_mask": mask},
            counts.argmax(1),
            step * BATCH + torch.arange(BATCH),
        )

    return Problem(model, [[model.layers[0]], [model.layers[1]], [model.head]], batch)


PROBLEMS: dict[str, Callable[[Comparison], Problem]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "random labels": _random_labels,
    "abrupt change": _abrupt,
    "sequences": _sequences,
}
