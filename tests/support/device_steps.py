"""Steps of every estimator on the simulated device, and the same on the CPU.

As a program it prints, by case, the largest copy to the device in elements, and how far the
gradients are from those of the CPU with the noise of a device; then the same with a bug; run by
tests/perturb/test_simulated_device.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flops import ES, DeepZero, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.estimators import MeZO
from flops.optim import ZerothOrderSGD
from flops.perturb import draws, random
from tests.conftest import flat, gradients, squared
from tests.support.contract import ESTIMATORS
from tests.support.simulated_device import DEVICE, Traffic, move

POINTS, QUERIES, STEPS = 6, 6, 2
BOUND = 2 * POINTS * QUERIES  # two integers for each draw; a row's noise is far more


@dataclass(frozen=True)
class Case:
    """A model with data, and an estimator for all of it."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    estimator: Any
    compact: int = random.COMPACT
    optimizer: bool = False
    keep: int = draws.KEEP


class Tokens(nn.Module):
    """A table of words and a table of positions, which all points share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        order = torch.arange(ids.size(1), device=ids.device).unsqueeze(0)
        hidden = self.body(self.table(ids) + self.places(order))
        return self.head((hidden * mask.unsqueeze(2)).sum(1))


def net() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(30, 40), nn.Tanh()), nn.Linear(40, 20)).double()


def vectors() -> Tensor:
    return torch.randn(POINTS, 30).double()


def sentences() -> dict[str, Tensor]:
    lengths = torch.tensor([5, 3, 4, 5, 2, 5])
    mask = (torch.arange(5) < lengths.unsqueeze(1)).double()
    return {"ids": torch.randint(11, (POINTS, 5)), "mask": mask}


SHAPING = Shaping(warm=0, mask="mask")
# The simulated device has no dual numbers.
NAMES = [name for name in ESTIMATORS if not name.startswith("JVP")]
CASES = {name: Case(net, vectors, ESTIMATORS[name]) for name in NAMES} | {
    "DeepZero": Case(net, vectors, DeepZero(score_draws=4)),
    "bits": Case(net, vectors, LikelihoodRatio(baseline="antithetic"), compact=0),
    "optimizer": Case(net, vectors, MeZO(), optimizer=True),
    "optimizer-pieces": Case(net, vectors, MeZO(), optimizer=True, keep=0),
    "tokens": Case(Tokens, sentences, LikelihoodRatio()),
    "tokens-shaped": Case(Tokens, sentences, LikelihoodRatio(targets="stage", shaping=SHAPING)),
    "tokens-es": Case(Tokens, sentences, ES()),
    "tokens-es-shaped": Case(Tokens, sentences, ES(shaping=Shaping(warm=0))),
    "tokens-es-shared": Case(Tokens, sentences, ES(shared=True)),
}


def steps(case: Case, traffic: Traffic | None = None) -> Tensor:
    """Gradients of some steps, or how far they moved; on the device if there is traffic."""
    torch.manual_seed(1)
    model, inputs, targets = case.model().double(), case.inputs(), torch.randn(POINTS, 20).double()
    if traffic is not None:
        model, targets = move(model), targets.to(DEVICE)
        inputs = tree_map(lambda x: x.to(DEVICE), inputs)
        for signs in (False, True):  # tables are sent once, whatever is estimated
            random.table(signs, DEVICE)
        traffic.copies.clear()
    estimator = case.estimator
    if estimator.sigma is not None:
        estimator = replace(estimator, sigma=1e-4)
    groups = [Group(list(model.children()), estimator, queries=QUERIES)]
    fg = ForwardGradient(model, squared, groups)
    if case.optimizer:
        optimizer, before = ZerothOrderSGD(fg, 1e-2, momentum=0.9), weights(model)
        for _ in range(STEPS):
            optimizer.step(inputs, targets)
        return weights(model) - before
    for _ in range(STEPS):
        fg.estimate(inputs, targets)
    return flat(gradients(model)).cpu()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def run(case: Case) -> tuple[int, float]:
    """The largest copy to the device, and the relative difference to the steps on the CPU."""
    random.COMPACT, draws.KEEP = case.compact, case.keep
    with Traffic() as traffic:
        found = steps(case, traffic)
    native, random.native = random.native, lambda device: False
    try:
        truth = steps(case)
    finally:
        random.native = native
    return max(traffic.copies), float((found - truth).norm() / truth.norm())


def plant() -> list[str]:
    """Noise is made on the CPU and sent; returns the cases that this breaks."""
    rows, fill = random.NoiseStream.rows, random.fill

    def sent_rows(
        self: random.NoiseStream, points: Tensor, numbers: Tensor, out: Any = None
    ) -> Tensor:
        home, self._device = self._device, torch.device("cpu")
        found = rows(self, points, numbers).to(home)
        self._device = home
        return found

    def sent_fill(kind: Any, key: tuple[int, ...], out: Tensor) -> Tensor:
        return out.copy_(fill(kind, key, torch.empty(out.shape)))

    random.NoiseStream.rows = sent_rows
    draws.fill = sent_fill
    return ["LikelihoodRatio", "LikelihoodRatio-shaping", "SPSA", "MeZO"]


if __name__ == "__main__":
    found = {name: run(CASES[name]) for name in CASES}
    print(json.dumps([found, {name: run(CASES[name]) for name in plant()}]))
