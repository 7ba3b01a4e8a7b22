"""Memory does not grow with the number of queries, and no noise is kept for a whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flops import SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.optim import ZerothOrderSGD, step_as_gradients_appear
from flops.perturb.draws import KEEP
from flops.presets import mezo
from tests.conftest import squared
from tests.support.peak_memory import peak


def stack(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@pytest.mark.parametrize(
    "estimator", [LikelihoodRatio(), LikelihoodRatio(targets="leaf"), SPSA(), SPSA(shared=True)]
)
def test_memory_does_not_grow_with_queries(estimator) -> None:
    model = stack(64, 4)
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def step(queries: int) -> Callable[[], object]:
        groups = [Group(model, estimator, queries=queries)]
        fg = ForwardGradient(model, squared, groups, chunk=64)

        def run() -> None:
            model.zero_grad()
            fg.estimate(x, y)

        return run

    few, many = peak(step(20)), peak(step(200))
    assert many < 1.05 * few + 200_000  # the plan's own rows: some dozen bytes per query


WIDTH, LAYERS = 1024, 8
LAYER = 4 * WIDTH * WIDTH
PIECES = 5 << 19  # of noise: values, indices and a sum at a time


def large() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A group that is not small, else all of its noise may be kept."""
    model = stack(WIDTH, LAYERS)
    assert sum(p.numel() for p in model.parameters()) > KEEP
    return model, torch.randn(4, WIDTH), torch.randn(4, WIDTH)


pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mezo_in_place_holds_a_copy_of_one_module(momentum: float) -> None:
    model, x, y = large()
    optimizer = ZerothOrderSGD(
        ForwardGradient(model, squared, mezo(model)), 1e-9, momentum=momentum, window=3
    )
    inference = peak(lambda: squared(model(x), y))
    assert LAYER < peak(lambda: optimizer.step(x, y)) < inference + LAYER + PIECES


def test_mezo_with_stepping_hooks_holds_one_gradient() -> None:
    model, x, y = large()
    fg = ForwardGradient(model, squared, mezo(model))
    step_as_gradients_appear(torch.optim.SGD(model.parameters(), lr=1e-9))
    inference = peak(lambda: squared(model(x), y))
    assert peak(lambda: fg.estimate(x, y)) < inference + LAYER + PIECES


def test_mezo_holds_a_gradient_and_no_noise() -> None:
    model, x, y = large()
    fg = ForwardGradient(model, squared, mezo(model))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        fg.estimate(x, y)

    whole = sum(p.nbytes for p in model.parameters())
    inference = peak(lambda: squared(model(x), y))
    assert peak(run) < inference + whole + PIECES


class Language(nn.Module):
    """A table that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_000, 256)
        self.head = nn.Linear(256, 20_000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_a_tied_table_is_copied_once() -> None:
    model, ids = Language(), torch.arange(4)
    table = model.embed.weight.nbytes
    assert model.embed.weight.numel() > KEEP

    def loss_fn(outputs: Tensor, _: None) -> Tensor:
        return outputs.square().sum(1)

    optimizer = ZerothOrderSGD(ForwardGradient(model, loss_fn, mezo(model)), 1e-9)
    inference = peak(lambda: loss_fn(model(ids), None))
    assert table < peak(lambda: optimizer.step(ids)) < inference + table + PIECES


def test_a_gradient_is_measured_without_a_copy() -> None:
    """The last layer's gradient by likelihood ratio: in the product, as a sum, and in ``.grad``."""
    model, x, y = large()
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    fg = ForwardGradient(model, squared, Group(model[-1], LikelihoodRatio(), 4))
    inference = peak(lambda: squared(model(x), y))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        fg.estimate(x, y)

    assert peak(run) < 4 * inference + 2 * LAYER + PIECES
