"""Wrappers, arguments, counts and precision: what is refused, what is unwrapped, what warns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flops import (
    ES,
    SPSA,
    BatchError,
    FlopsError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    PrecisionWarning,
    QueryError,
)
from flops.allocators import Equal, Fixed
from tests.conftest import ESTIMATORS, squared
from tests.support.refusing import BLOCK, PAIRS, SIZE, data, mlp, refused, works

# Wrappers


def test_a_compiled_copy_is_unwrapped() -> None:
    model = mlp()
    fg = ForwardGradient(torch.compile(model, backend="eager"), squared)
    assert fg.model is model
    works(fg, *data())


def test_data_parallel_is_unwrapped() -> None:
    model = mlp()
    fg = ForwardGradient(nn.DataParallel(model), squared)
    assert fg.model is model
    works(fg, *data())


def test_distributed_data_parallel_is_unwrapped() -> None:
    model = mlp()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        fg = ForwardGradient(nn.parallel.DistributedDataParallel(model), squared)
        assert fg.model is model
        works(fg, *data())
    finally:
        torch.distributed.destroy_process_group()


def test_a_mesh_whose_process_group_is_gone_is_refused() -> None:
    """It used to train alone, each rank by itself."""
    model = mlp()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        fg = ForwardGradient(model, squared, process_group=mesh)
        works(fg, *data())
    finally:
        torch.distributed.destroy_process_group()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"not initialised.*process_group=None"):
        fg.estimate(*data())
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    fg.process_group = None
    works(fg, *data())


def test_what_is_compiled_in_place_is_refused() -> None:
    model = mlp()
    model[2].compile(backend="eager")
    with pytest.raises(FlopsError, match=r"module '2' is compiled.*without compiling"):
        ForwardGradient(model, squared)
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(FlopsError, match="module 'model' is compiled"):
        ForwardGradient(model, squared)
    with pytest.raises(FlopsError, match="module '0' is compiled"):
        ForwardGradient(nn.Sequential(torch.compile(nn.Linear(4, 2), backend="eager")), squared)


def test_script_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(mlp())
        traced = torch.jit.trace(mlp(), data()[0])
    for model in (script, traced, nn.Sequential(nn.Linear(4, 4), script)):
        with pytest.raises(FlopsError, match="is a ScriptModule; pass the eager model"):
            ForwardGradient(model, squared)


# The arguments of a step


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([0, 1, 2], "3 entries for 5 points"),
        (torch.arange(6), "6 entries for 5 points"),
        ([0, 1, 2, 3, 0], "contains a point twice"),
        ([0.0, 1.0, 2.0, 3.0, 4.0], "one integer per point, not torch.float32"),
        (torch.ones(5, dtype=torch.bool), "one integer per point, not torch.bool"),
        (torch.arange(5).view(5, 1), r"one integer per point, not .* \(5, 1\)"),
        (torch.tensor(3), "one integer per point"),
    ],
)
def test_index(index: Any, match: str) -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, BatchError, match, True):
        fg.estimate(*batch, index=index)
    for good in ([4, 9, 2, 0, 10**12], torch.arange(5), np.arange(5), range(5)):
        works(fg, *batch, index=good)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, y: ([x], y), "inputs must be a tensor"),
        (lambda x, y: (x[:0], y[:0]), "batch is empty"),
        (lambda x, y: (x, y[:3]), "targets have 3 points"),
        (lambda x, y: ((), None), "no tensor with a batch axis"),
    ],
)
def test_inputs(make: Callable[[Tensor, Tensor], Any], match: str) -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, BatchError, match, True):
        fg.estimate(*make(*batch))
    works(fg, *batch)


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, FlopsError, "outside of torch.inference_mode"), torch.inference_mode():
        fg.estimate(*batch)
    with torch.no_grad():
        works(fg, *batch)
    with torch.inference_mode():
        made_there = tuple(t.clone() for t in batch)
    works(fg, *made_there)


# Counts


@pytest.mark.parametrize(
    ("counts", "estimator", "match"),
    [
        ([1, 2, 3], BLOCK, "3 counts were given for 5 points"),
        ([1, 2, 3, 4, 0], BLOCK, "at least 1"),
        ([2, 2, 2, 2, 3], PAIRS, "multiples of 2"),
        ([2, 2, 2, 2, 0], PAIRS, "at least 2"),
        ([1, 2, 1, 2, 1], ES(shared=True), "shared by the batch.*same number"),
        ([2, 4, 2, 2, 2], SPSA(shared=True), "shared by the batch.*same number"),
    ],
)
def test_counts_given_by_hand(counts: list[int], estimator: Any, match: str) -> None:
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, estimator), allocator=Fixed(counts))
    with refused(fg, QueryError, match, True):
        fg.estimate(*batch)


@pytest.mark.parametrize("counts", [[1.5, 2], [[1, 2]], ["a"], 3])
def test_counts_that_are_no_integers(counts: Any) -> None:
    with pytest.raises(QueryError, match="one whole number per point"):
        Fixed(counts)


def test_a_shared_budget_that_does_not_divide() -> None:
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, SPSA(shared=True), queries=3))
    with refused(fg, QueryError, "shared by the batch.*whole number of draws"):
        fg.estimate(*batch)


class Broken(Equal):
    """Returns what it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def allocate(self, signal: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (torch.ones(4, dtype=torch.long), r"LongTensor of shape \(5,\)"),
        (torch.ones(5), r"LongTensor of shape \(5,\)"),
        ([1] * 5, r"LongTensor of shape \(5,\)"),
        (torch.tensor([2, 2, 2, 2, -2]), "none negative"),
        (torch.zeros(5, dtype=torch.long), "not all 0"),
        (torch.tensor([2, 2, 2, 2, 1]), "multiples of 2"),
    ],
)
def test_an_allocator_that_returns_nonsense(answer: Any, match: str) -> None:
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, PAIRS, name="g"), allocator=Broken(answer))
    with refused(fg, QueryError, f"group 'g'.*{match}"):
        fg.estimate(*batch)


# Precision


def slope(size: float) -> tuple[ForwardGradient, tuple[Tensor, Tensor]]:
    """An engine whose median loss difference is about size * rounding unit of a loss of 100."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    sigma = size * torch.finfo(torch.float32).eps * 100
    group = Group(model, LikelihoodRatio(sigma=sigma, noise="rademacher"), name="g")
    fg = ForwardGradient(model, lambda o, t: o.flatten() + t, group)
    return fg, (torch.randn(SIZE, 4), torch.full((SIZE,), 100.0))


def test_a_warning_when_rounding_dominates() -> None:
    fg, batch = slope(20)
    with pytest.warns(PrecisionWarning, match=r"group 'g'.*under 50 rounding units.*raise sigma"):
        fg.estimate(*batch)
    fg.estimate(*batch)  # once per group is enough: warnings are errors here
    again, batch = slope(20)
    with refused(again, PrecisionWarning, "rounding"):  # as an error it comes before any change
        again.estimate(*batch)


def test_a_warning_when_all_differences_vanish() -> None:
    fg, batch = slope(0.01)
    with pytest.warns(PrecisionWarning, match="under 50 rounding units"):
        fg.estimate(*batch)


@pytest.mark.parametrize("size", [80, 1000])
def test_no_warning_above(size: float) -> None:
    fg, batch = slope(size)
    fg.estimate(*batch)  # warnings are errors


@pytest.mark.parametrize("name", ["block", "antithetic", "es", "es-shared", "spsa", "spsa-shared"])
def test_every_estimator_warns(name: str) -> None:
    model, (x, y) = mlp(), data()
    for sigma, warns in ((1e-7, True), (1e-2, False)):
        estimator = copy.copy(ESTIMATORS[name])
        object.__setattr__(estimator, "sigma", sigma)
        fg = ForwardGradient(model, squared, Group(model, estimator))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fg.estimate(x, y)
        assert [w.category for w in seen] == [PrecisionWarning] * warns
        assert all(w.filename == __file__ for w in seen)
