"""Exceptions in the user's code: whenever they come, nothing has changed."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flops import (
    ForwardGradient,
    Group,
)
from tests.conftest import ESTIMATORS, squared
from tests.support.refusing import Noisy, data, mlp, refused, works

# Exceptions in the user's code


class Boom(Exception):
    """An error of the user's own."""


class Bomb:
    """Raises at the k-th call from anywhere."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls, self.at = error, 0, -1

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class Armed(nn.Module):
    """A layer that calls the bomb before or after its work."""

    def __init__(self, bomb: Bomb, layer: nn.Module, late: bool) -> None:
        super().__init__()
        self.layer, self.late = layer, late
        self._bomb = [bomb]

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self._bomb[0]()
        out = self.layer(x)
        if self.late:
            self._bomb[0]()
        return out


# Every call for one estimator of each kind, some calls for all.
WHOLE = ("block", "es", "spsa-shaped", "jvp")
STRIDES = [
    *((name, Boom, 1 if name in WHOLE else 4) for name in ESTIMATORS),
    *((name, KeyboardInterrupt, 7) for name in ESTIMATORS),
    *(
        pytest.param(name, Boom, 1, marks=pytest.mark.slow)
        for name in ESTIMATORS
        if name not in WHOLE
    ),
    *(pytest.param(name, KeyboardInterrupt, 3, marks=pytest.mark.slow) for name in ESTIMATORS),
]


@pytest.mark.parametrize(("name", "error", "stride"), STRIDES)
def test_an_exception_at_any_call_changes_nothing(
    name: str, error: type[BaseException], stride: int
) -> None:
    bomb, (x, y) = Bomb(error), data(3)
    layers = [Armed(bomb, layer, i % 2 == 1) for i, layer in enumerate(mlp()) if i != 3]
    model = nn.Sequential(*layers)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        bomb()
        return squared(outputs, targets)

    def engine() -> ForwardGradient:
        bomb.calls, bomb.at = 0, -1
        halves = [Group(model[:2], ESTIMATORS[name], 2, name="a")]
        halves += [Group(model[2:], ESTIMATORS[name], 2, name="b")]
        return ForwardGradient(model, loss_fn, halves, chunk=4)

    def reference() -> list[Tensor]:
        model.zero_grad()
        engine().estimate(x, y)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth = reference()
    total = bomb.calls
    fg = engine()
    fg.estimate(x, y)
    bomb.calls = 0
    fg.estimate(x, y)
    probe = total - bomb.calls  # calls that only a new kind of input needs
    assert total >= 20
    values = copy.deepcopy(model.state_dict())
    for at in range(1, total + 1, stride):
        fg = engine()
        bomb.at = at
        try:
            with refused(fg, error, grad=at % 2 == 0):
                fg.estimate(x, y)
        except pytest.fail.Exception:
            # A trial of what can be reused takes an error for "needs what was left out".
            assert error is Boom
            assert at <= probe
            assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
            continue
        bomb.at = -1
        model.zero_grad()
        fg.estimate(x, y)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def test_an_exception_after_a_random_draw_restores_the_random_state() -> None:
    def draw_and_raise(x: Tensor) -> Tensor:
        torch.rand(3), np.random.rand(), random.random()
        raise Boom

    fg, batch = ForwardGradient(Noisy(draw_and_raise), squared), data()
    with refused(fg, Boom):
        fg.estimate(*batch)
    fg.model.source = None
    works(fg, *batch)
