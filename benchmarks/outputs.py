"""What a `Tuner` learns from the outputs of a black box: Jacobian memory against the mean Jacobian.

Three boxes that return logits, with few points, which are visited ten times, and with many, which
are visited once or twice. All methods pay for the same rows: 40 steps, batches of 16, 8 queries per
point, Adam. Each has the best of four learning rates on a seed of its own; then the mean loss over
all points at the end, over 6 other seeds. Differences are paired by seed, with 95 % intervals;
above 0, the memory is worse.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from flops import LikelihoodRatio, Shaping
from flops.blackbox import Outputs, Tuner
from flops.report.intervals import paired

STEPS, BATCH, QUERIES, SIGMA = 40, 16, 8, 0.01
POINTS = {"few": 64, "many": 512}
RATES = (0.01, 0.03, 0.1, 0.3)
SEEDS, CHOICE = range(6), 100
LOSSES, MEAN, MEMORY = METHODS = ("losses", "mean Jacobian", "Jacobian memory")


@dataclass(frozen=True)
class Box:
    """Logits of points under parameters, of shape (Q, d), and a loss of them."""

    logits: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    start: Tensor
    points: int

    def columns(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Loss and logits of rows."""
        found = self.logits(parameters, points)
        return torch.cat([self.loss(found, points).unsqueeze(1), found], 1)

    def mean(self, parameters: Tensor) -> float:
        """Mean loss of all points."""
        every = torch.arange(self.points)
        return float(self.columns(parameters.expand(len(every), -1), every)[:, 0].double().mean())


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logistic(points: int) -> Box:
    """Logistic regression of 30 inputs: the Jacobian of a point is its input."""
    x = _random(0, points, 30)
    y = torch.sign(x @ _random(1, 30) + 0.5 * _random(2, points))
    return Box(
        lambda w, j: (w * x[j]).sum(1, keepdim=True),
        lambda o, j: F.softplus(-y[j] * o[:, 0]),
        torch.zeros(30),
        points,
    )


def softmax(points: int) -> Box:
    """Softmax regression of 20 inputs, one of them constant, and 5 classes."""
    x = torch.cat([_random(0, points, 19), torch.ones(points, 1)], 1)
    y = (x @ _random(1, 20, 5) + _random(2, points, 5)).argmax(1)
    return Box(
        lambda w, j: torch.einsum("qkd,qd->qk", w.view(-1, 5, 20), x[j]),
        lambda o, j: F.cross_entropy(o, y[j], reduction="none"),
        torch.zeros(100),
        points,
    )


def prompt(points: int) -> Box:
    """A vector of 64 that is added to the input of a fixed network with 5 classes."""
    x, shift = _random(0, points, 64), 0.5 * _random(1, 64)
    first, last = _random(2, 64, 64) / 8, _random(3, 64, 5) / 8

    def logits(vectors: Tensor, j: Tensor) -> Tensor:
        return 4 * torch.tanh((x[j] + vectors) @ first) @ last

    y = logits(shift.expand(points, -1), torch.arange(points)).argmax(1)
    return Box(
        logits, lambda o, j: F.cross_entropy(o, y[j], reduction="none"), torch.zeros(64), points
    )


BOXES = {"logistic regression": logistic, "softmax regression": softmax, "soft prompt": prompt}


def end(box: Box, method: str, rate: float, seed: int) -> float:
    """Mean loss at the end."""
    outputs = None
    if method in (MEAN, MEMORY):
        newest = 0 if method == MEAN else 96
        outputs = Outputs(lambda columns: columns[:, 1:], box.loss, newest=newest)
    tuner = Tuner(
        box.start,
        box.columns,
        points=box.points,
        estimator=LikelihoodRatio(SIGMA, shaping=None if method == LOSSES else Shaping()),
        queries=QUERIES,
        batch=BATCH,
        learning_rate=rate,
        outputs=outputs,
        seed=seed,
        budget=STEPS * BATCH * (QUERIES + 1),
    )
    for _ in tuner.run():
        pass
    return box.mean(tuner.parameters)


def compared(box: Box) -> dict[str, Any]:
    """Losses of the methods with their rates, and differences with their intervals."""
    found: dict[str, Any] = {"start": box.mean(box.start)}
    ends: dict[str, list[float]] = {}
    for method in METHODS:
        tried = {rate: end(box, method, rate, CHOICE) for rate in RATES}
        rate = min(tried, key=lambda r: tried[r])
        ends[method] = [end(box, method, rate, seed) for seed in SEEDS]
        found[method], found[f"{method}, rate"] = statistics.mean(ends[method]), rate
    for name, other in (("memory - mean", MEAN), ("memory - losses", LOSSES)):
        difference = paired(ends[MEMORY], ends[other])
        found[name] = [difference.mean, difference.half]
    return found


def cases() -> Iterator[tuple[str, Box]]:
    """Names and boxes."""
    for name, make in BOXES.items():
        for many, points in POINTS.items():
            yield f"{name}, {many} points", make(points)


def run() -> dict[str, Any]:
    """All boxes."""
    return {name: compared(box) for name, box in track(list(cases()), "outputs", transient=True)}
