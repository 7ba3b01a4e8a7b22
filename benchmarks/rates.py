"""The step size that a run finds itself, against a sweep of learning rates at equal rows.

Eight objectives of different scales, twelve rates half a decade apart, 50 and 150 steps' worth of
rows (8 queries per point, batches of 16), 2 seeds. The search is charged: it has fewer steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from flops import LikelihoodRatio
from flops.blackbox import Tuner

QUERIES, BATCH, SEEDS = 8, 16, 2
STEPS = (50, 150)
EXPONENTS = range(-3, 9)  # rates sigma * 10 ** (k / 2)


class Problem(NamedTuple):
    """An objective, where to start, its points and a noise scale."""

    losses: Callable[[Tensor, Tensor], Tensor]
    start: Tensor
    points: int
    sigma: float


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quadratic(scale: float, unit: float = 1.0, sigma: float = 0.03) -> Problem:
    centres = (0.3 * _random(0, 16, 20) + _random(1, 20)) * scale
    curvature = torch.logspace(0, 1, 20)

    def losses(parameters: Tensor, points: Tensor) -> Tensor:
        return unit * (curvature * ((parameters - centres[points]) / scale) ** 2).sum(1)

    return Problem(losses, torch.zeros(20), 16, sigma * scale)


def logistic() -> Problem:
    x, w = _random(0, 128, 30), _random(1, 30)
    y = torch.sign(x @ w + 0.5 * _random(5, 128))

    def losses(parameters: Tensor, points: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-y[points] * (parameters * x[points]).sum(1))

    return Problem(losses, torch.zeros(30), 128, 0.01)


def errors() -> Problem:
    x = _random(0, 200, 10)
    y = torch.sign(x @ _random(1, 10))

    def losses(parameters: Tensor, points: Tensor) -> Tensor:
        return (torch.sign((parameters * x[points]).sum(1)) != y[points]).float()

    return Problem(losses, _random(9, 10), 200, 0.3)


def rosenbrock() -> Problem:
    def losses(p: Tensor, points: Tensor) -> Tensor:
        return (100 * (p[:, 1:] - p[:, :-1] ** 2) ** 2 + (1 - p[:, :-1]) ** 2).sum(1)

    return Problem(losses, torch.full((8,), -0.5), 1, 0.01)


def ackley() -> Problem:
    def losses(p: Tensor, points: Tensor) -> Tensor:
        q = p - 0.7
        far = 20 * torch.exp(-0.2 * q.square().mean(1).sqrt())
        return 20 + math.e - far - torch.exp(torch.cos(2 * math.pi * q).mean(1))

    return Problem(losses, torch.full((10,), 3.0), 1, 0.3)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratic": lambda: quadratic(1.0),
    "parameters of 1e-3": lambda: quadratic(1e-3),
    "parameters of 1e3, losses of 1e-3": lambda: quadratic(1e3, 1e-4),
    "sigma 1e-4 of the distance": lambda: quadratic(100.0, sigma=1e-4),
    "logistic regression": logistic,
    "error rate": errors,
    "Rosenbrock, one point": rosenbrock,
    "Ackley, one point": ackley,
}


def end(problem: Problem, rate: float | None, seed: int, steps: int) -> tuple[float, float]:
    """Mean loss at the end, and the last rate."""
    tuner = Tuner(
        problem.start,
        problem.losses,
        points=problem.points,
        estimator=LikelihoodRatio(problem.sigma),
        queries=QUERIES,
        batch=BATCH,
        learning_rate=rate,
        seed=seed,
        budget=steps * min(BATCH, problem.points) * (QUERIES + 1),
    )
    for _ in tuner.run():
        pass
    last = tuner.optimizer.param_groups[0]["lr"]
    return mean(problem, tuner.parameters), last


def mean(problem: Problem, parameters: Tensor) -> float:
    every = torch.arange(problem.points)
    return float(problem.losses(parameters.expand(len(every), -1), every).double().mean())


def average(problem: Problem, rate: float | None, steps: int) -> float:
    return statistics.mean(end(problem, rate, seed, steps)[0] for seed in range(SEEDS))


def run(steps: tuple[int, ...] = STEPS) -> dict[str, Any]:
    rows = {}
    for name, make in track(PROBLEMS.items(), "rates"):
        problem, row = make(), dict[str, Any]()
        start = mean(problem, problem.start)
        for count in steps:
            rates = {k: problem.sigma * 10 ** (k / 2) for k in EXPONENTS}
            sweep = {k: average(problem, rate, count) for k, rate in rates.items()}
            best = min(sweep, key=lambda k: sweep[k])
            beside = [sweep[k] for k in (best - 1, best + 1) if k in sweep]
            own = average(problem, None, count)
            left = [(loss - sweep[best]) / (start - sweep[best]) for loss in (own, *beside)]
            row[f"best rate, {count}"] = rates[best]
            row[f"searched, {count}"] = end(problem, None, 0, count)[1]
            row[f"left, {count}"] = left[0]
            row[f"left beside the best, {count}"] = left[1:]
        rows[name] = row
    return rows
