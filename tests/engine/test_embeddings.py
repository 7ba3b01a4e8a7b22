"""Embeddings that allocators are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    CoverageError,
    ForwardGradient,
    Group,
)
from flops.allocators import Gaussian
from tests.support.scaled import LEAF, SCALES, SIZE, Net, Spy, engine, scaled


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SIZE, 3).double()


# Embeddings


def shown(model: nn.Module, x: Tensor, loss_fn: Any, y: Tensor, **options: Any) -> Tensor | None:
    spy = Spy()
    fg = ForwardGradient(model, loss_fn, Group(model, LEAF, 2), allocator=spy, **options)
    fg.estimate(x, y)
    return spy.seen[0].embeddings


def test_the_embedding_is_the_input_of_the_head(model: Net, x: Tensor) -> None:
    with torch.no_grad():
        hidden = torch.tanh(model.first(x))
        expected = torch.tanh(model.second(hidden)).float()
        torch.testing.assert_close(shown(model, x, scaled, SCALES), expected)
        for wanted in ("second", model.second):
            found = shown(model, x, scaled, SCALES, embedding=wanted)
            torch.testing.assert_close(found, model.second(hidden).float())


def test_an_unknown_embedding_is_a_clear_error(model: Net, x: Tensor) -> None:
    with pytest.raises(CoverageError, match="'nowhere' is not a module"):
        engine(model, Gaussian(), embedding="nowhere").estimate(x, SCALES)
    with pytest.raises(CoverageError, match="not a module"):
        engine(model, Gaussian(), embedding=nn.Linear(2, 2)).estimate(x, SCALES)
    model.idle = nn.Identity()
    with pytest.raises(CoverageError, match="'idle' never runs"):
        engine(model, Gaussian(), embedding="idle").estimate(x, SCALES)


def test_embeddings_of_sequences_and_images() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.flatten(1).sum(1) - targets).square()

    y = torch.randn(SIZE).double()
    tokens = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(SIZE, 5, 3).double()
    with torch.no_grad():
        expected = tokens[:2](x).mean(1).float()
    torch.testing.assert_close(shown(tokens, x, loss, y), expected)
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh()).double()
    x = torch.randn(SIZE, 1, 5, 4).double()
    assert shown(images, x, loss, y) is None  # no head
    with torch.no_grad():
        expected = images[0](x).flatten(1).float()
    torch.testing.assert_close(shown(images, x, loss, y, embedding="0"), expected)
    fg = ForwardGradient(images, loss, Group(images, LEAF, 4), allocator=Gaussian())
    fg.estimate(x, y)


def test_embeddings_are_those_of_the_batch(model: Net, x: Tensor) -> None:
    """Also when the layout was found with another batch, of another size."""
    spy = Spy()
    fg = engine(model, spy)
    fg.estimate(x, SCALES)
    fg.estimate(x[2:5], SCALES[2:5])
    torch.testing.assert_close(spy.seen[1].embeddings, spy.seen[0].embeddings[2:5])
