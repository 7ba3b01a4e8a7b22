"""What every allocator keeps to, with every estimator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flops.allocators import Signal
from tests.support.contract import (
    ALLOCATORS,
    POINTWISE,
    QUERIES,
    SIZE,
    Net,
    data,
    engine,
    gradient,
)
from tests.support.covering import in_turn
from tests.support.random_state import global_random_state


def make_allocator(cls: type, size: int, queries: int = QUERIES) -> Any:
    """An allocator with its defaults, or from counts if it has none."""
    try:
        return cls()
    except TypeError:
        return cls([queries] * size)


@pytest.fixture
def model() -> Net:
    return Net().double()


# Allocators


def signal(size: int, unit: int, mean: int, **options: Any) -> Signal:
    losses = torch.linspace(0.1, 3, size)
    return Signal(losses, mean * size // unit * unit, unit, unit, "g", **options)


@pytest.mark.parametrize("index", [None, torch.arange(20)])
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_counts_fit_the_budget(name: str, size: int, unit: int, index: Tensor | None) -> None:
    before = global_random_state()
    for mean in (unit, 6, 12):
        allocator = make_allocator(ALLOCATORS[name], size, mean)
        index = None if index is None else torch.arange(size)
        given = signal(size, unit, mean, index=index)
        counts = allocator.allocate(given)
        assert counts.dtype == torch.long
        assert counts.shape == (size,)
        assert int(counts.sum()) == given.budget
        assert int(counts.min()) >= given.minimum
        assert not (counts % unit).any()
    assert global_random_state() == before


@pytest.mark.parametrize(
    ("estimator", "name"), in_turn(POINTWISE, ALLOCATORS, full=["LikelihoodRatio", "SPSA"])
)
def test_every_allocator_serves_every_estimator(name: str, estimator: str, model: Net) -> None:
    x, y = data()
    runs = []
    for _ in range(2):
        allocator = make_allocator(ALLOCATORS[name], SIZE)
        fg = engine(model, estimator, allocator=allocator, seed=3)
        runs.append([gradient(fg, x, y, index=range(SIZE)) for _ in range(2)])
        assert fg.allocators["first"] is not fg.allocators["second"]  # one for each group
        assert fg.allocators["first"] is not allocator
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.bits
def test_the_state_of_an_allocator_survives(name: str) -> None:
    allocator = make_allocator(ALLOCATORS[name], 5)
    for _ in range(3):
        allocator.allocate(signal(5, 1, QUERIES))
    other = make_allocator(ALLOCATORS[name], 5)
    other.load_state_dict(copy.deepcopy(allocator.state_dict()))
    for _ in range(3):
        here = allocator.allocate(signal(5, 1, QUERIES))
        assert torch.equal(other.allocate(signal(5, 1, QUERIES)), here)
