"""Peers: comparison of our estimates with torchzero, torchopt and a plain MeZO loop.

The layers of the bundled ViT after 60 steps of backpropagation, batches of 64 digits. "passes" is
the cost of a step in forward passes of the whole batch (calls of the model for the others; forward
equivalents for ours, including clean pass and local VJPs), at about equal cost. "seconds /
inference" is the time of a step over that of as many plain inference passes, interleaved. "cosine"
is to the exact gradient of all layers, mean over batches. It grows with the root of the passes
while it is small, so "passes for .1" extrapolates the passes for a cosine of 0.1; training passes
of allocators and shaped noise are listed separately. "drift" is the relative change of the
parameters after 100 steps of 2 queries with a learning rate of 0.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks.allocation import batch
from benchmarks.quality import BATCH, finetuned, loss_fn
from benchmarks.rivals import PlainMezo, Step, gradient, rivals, trained
from benchmarks.timing import median_and_spread
from flops import SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.presets import mezo
from flops.tasks.classification import digits
from flops.tasks.data.digits import Split

PASSES, SEEDS, WARM, DRIFT = 32, 5, 12, 100


def engines(model: Any, passes: int = PASSES) -> dict[str, ForwardGradient]:
    """Our engines at about the same cost, which depends on the location of the noise."""

    def thirds(estimator: Any, queries: int) -> list[Group]:
        layers = list(model.vit.layers)
        return [
            Group(layers[i : i + 2], estimator, max(2, queries), name=f"third {i // 2 + 1}")
            for i in (0, 2, 4)
        ]

    left = max(0, passes - 4)  # clean pass and local VJPs
    lr, stage = LikelihoodRatio(), LikelihoodRatio(targets="stage", shaping=Shaping())
    made = {
        "ours: MeZO": (mezo(model, queries=passes), None),
        "ours: SPSA, shared draws": (thirds(SPSA(shared=True), (passes - 1) // 4 * 2), None),
        "ours: SPSA, per-point draws": (thirds(SPSA(), (passes - 1) // 4 * 2), None),
        "ours: LR, block": (thirds(lr, round(left / 1.5)), None),
        "ours: LR, block, Gaussian": (thirds(lr, round(left / 1.5)), Gaussian()),
        "ours: LR, stage, shaped, Gaussian": (thirds(stage, left), Gaussian()),
    }
    return {
        name: ForwardGradient(model, loss_fn, groups, allocator=allocator)
        for name, (groups, allocator) in made.items()
    }


class Calls:
    """Counts forward passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.count += 1


def inference(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of one plain pass; the minimum of three."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        with torch.inference_mode():
            loss_fn(model(x), y).mean()
        found.append(time.perf_counter() - started)
    return min(found)


def exact(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    loss_fn(model(x), y).mean().backward()
    found = gradient(trained(model).values())
    model.zero_grad()
    return found


def drift(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> dict[str, float]:
    """Relative change of the parameters with a learning rate of 0, by method."""
    found = {}
    clean = torch.cat([p.detach().flatten() for p in trained(model).values()])
    makers = {"plain MeZO loop": lambda m: PlainMezo(m, 1), **dict.fromkeys(rivals(model, 2))}
    makers["ours: MeZO"] = lambda m: ForwardGradient(m, loss_fn, mezo(m)).estimate
    for name, make in makers.items():
        moved = copy.deepcopy(model)
        step = make(moved) if make is not None else rivals(moved, 2)[name]
        if step is None:
            continue
        for _ in range(steps):
            step(x, y)
        after = torch.cat([p.detach().flatten() for p in trained(moved).values()])
        found[name] = float((after - clean).norm() / clean.norm())
    return found


def run(passes: int = PASSES, seeds: int = SEEDS, warm: int = WARM) -> dict[str, Any]:
    """All methods on the same batches, in turn."""
    train = digits().train
    model: Any = finetuned(train, 60)
    model.requires_grad_(False)
    model.vit.layers.requires_grad_(True)
    x, y = train.batch(batch(train, BATCH, 0))
    drifts = drift(model, x, y, min(DRIFT, 10 * passes))
    calls, ours = Calls(model), engines(model, passes)
    theirs = rivals(model, passes)
    learned = {name: learn(engine, train, warm) for name, engine in ours.items()}
    steps: dict[str, Step] = {n: s for n, s in theirs.items() if s is not None}
    found: dict[str, list[tuple[float, float, float]]] = {n: [] for n in [*steps, *ours]}
    for seed in track(range(seeds + 1), description="peers", transient=True):
        x, y = train.batch(batch(train, BATCH, 10**6 + seed))
        truth = exact(model, x, y)
        for name in found:
            model.zero_grad()
            single = inference(model, x, y)
            calls.count, started = 0, time.perf_counter()
            report = ours[name].estimate(x, y) if name in ours else steps[name](x, y)
            seconds = time.perf_counter() - started
            cost = float(report.forward_equivalents) / BATCH if name in ours else calls.count
            cosine = F.cosine_similarity(gradient(trained(model).values()), truth, 0)
            if seed:  # the first is a warm-up
                found[name].append((cost, seconds / cost / single, float(cosine)))
    results: dict[str, Any] = {}
    for name, rows in found.items():
        costs, times, cosines = (list(column) for column in zip(*rows, strict=True))
        middle, spread = median_and_spread(times)
        mean = statistics.mean(cosines)
        results[name] = {
            "passes": statistics.mean(costs),
            "seconds / inference": middle,
            "spread": spread,
            "cosine": mean,
            "cosine spread": statistics.stdev(cosines) if len(cosines) > 1 else 0.0,
            "passes for .1": statistics.mean(costs) * (0.1 / max(mean, 1e-9)) ** 2,
            "training passes": learned.get(name) or None,
            "drift": drifts.get(name),
        }
    for name, step in theirs.items():
        if step is None:
            results[name] = {"passes": f"not installed: pip install {name.split()[0]}"}
    return results


def learn(engine: ForwardGradient, train: Split, steps: int) -> float:
    """Train allocators and shaped noise on other batches; return the cost in passes."""
    learns = any(
        isinstance(a, Gaussian) or getattr(g.estimator, "shaping", None)
        for g, a in zip(engine.groups, engine.allocators.values(), strict=True)
    )
    cost = 0.0
    for step in range(steps if learns else 0):
        rows = batch(train, BATCH, step)
        cost += float(engine.estimate(*train.batch(rows), index=rows).forward_equivalents)
    return cost / BATCH
