"""What every estimator keeps to: precision, copies, scales of the loss, the order of points."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

from flops import ForwardGradient
from flops.allocators import Fixed
from tests.conftest import flat, gradients, squared
from tests.support.contract import (
    ESTIMATORS,
    POINTWISE,
    SIZE,
    Net,
    data,
    engine,
    every,
    gradient,
    groups,
)
from tests.support.covering import in_turn

pointwise = pytest.mark.parametrize("name", POINTWISE)


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.mark.parametrize(("name", "dtype"), in_turn(ESTIMATORS, [torch.bfloat16, torch.float16]))
def test_half_precision(name: str, dtype: torch.dtype, model: Net) -> None:
    x, y = (t.to(dtype) for t in data())
    estimator = ESTIMATORS[name]
    if estimator.minimum_queries > 0 and estimator.has_sigma:
        estimator = dataclasses.replace(estimator, sigma=0.1)
    seen, read = [], []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        read.append(outputs.dtype)
        return squared(outputs, targets)

    model.to(dtype).register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    fg = ForwardGradient(model, loss_fn, groups(model, estimator))
    fg.estimate(x, y)
    assert set(seen) == {dtype}  # the model itself is not widened
    assert set(read) == {torch.float32}  # its losses are
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()
    assert flat(gradients(model)).count_nonzero() > 0


@every
def test_half_precision_keeps_the_gradient(name: str, model: Net) -> None:
    x, y = data()
    estimator = ESTIMATORS[name]
    if estimator.minimum_queries > 0 and estimator.has_sigma:
        estimator = dataclasses.replace(estimator, sigma=0.3)
    truth = gradient(ForwardGradient(model, squared, groups(model, estimator)), x, y)
    half = copy.deepcopy(model).bfloat16()
    fg = ForwardGradient(half, squared, groups(half, estimator))
    found = gradient(fg, x.bfloat16(), y.bfloat16()).double()
    assert float(torch.cosine_similarity(found, truth, dim=0)) > 0.9


@every
def test_autocast_sees_the_perturbed_parameters(name: str, model: Net) -> None:
    x, y = (t.float() for t in data())
    estimator = ESTIMATORS[name]
    if estimator.minimum_queries > 0 and estimator.has_sigma:
        estimator = dataclasses.replace(estimator, sigma=0.3)
    model.float()

    def widened(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared(outputs.float(), targets)

    plain = gradient(ForwardGradient(model, widened, groups(model, estimator)), x, y)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # leaves casts of the parameters in the cache
        found = gradient(ForwardGradient(model, widened, groups(model, estimator)), x, y)
        assert torch.is_autocast_cache_enabled()
    assert float(torch.cosine_similarity(found, plain, dim=0)) > 0.9


@every
def test_a_copy_goes_its_own_way(name: str, model: Net) -> None:
    x, y = data()
    fg = engine(model, name, seed=3)
    fg.estimate(x, y)
    twin = pickle.loads(pickle.dumps(fg)) if name in ("SPSA", "Exact") else copy.deepcopy(fg)
    model.zero_grad()
    theirs = gradient(twin, x, y)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(gradient(fg, x, y), theirs)


@every
def test_a_constant_added_to_the_loss(name: str, model: Net) -> None:
    if getattr(ESTIMATORS[name], "baseline", "") == "none":
        pytest.skip("without a baseline the loss itself is the slope")
    x, y = data()
    plain = gradient(engine(model, name), x, y)
    more = gradient(engine(model, name, lambda o, t: squared(o, t) + 7), x, y)
    torch.testing.assert_close(more, plain, rtol=1e-6, atol=1e-8)


@every
def test_a_factor_of_the_loss(name: str, model: Net) -> None:
    x, y = data()
    plain = gradient(engine(model, name), x, y)
    tripled = gradient(engine(model, name, lambda o, t: 3 * squared(o, t)), x, y)
    factor = 1 if name == "FZOO" else 3  # its gradient has the scale of the loss divided out
    torch.testing.assert_close(tripled, factor * plain, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("name", "path"), in_turn(ESTIMATORS, ["cpu", "device"]), indirect=["path"]
)
@pytest.mark.bits
def test_with_an_index_the_order_of_points_does_not_matter(name: str, model: Net) -> None:
    (x, y), index = data(), torch.tensor([40, 7, 300, 2])
    order = torch.tensor([2, 0, 3, 1])
    here = gradient(engine(model, name), x, y, index=index)
    there = gradient(engine(model, name), x[order], y[order], index=index[order])
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("name", "path"), in_turn(POINTWISE, ["cpu", "device"]), indirect=["path"])
def test_without_an_index_noise_is_keyed_by_place(name: str, model: Net) -> None:
    (x, y), order = data(), torch.tensor([2, 0, 3, 1])
    plain = gradient(engine(model, name), x, y)
    assert torch.equal(gradient(engine(model, name), x, y, index=range(SIZE)), plain)
    moved = gradient(engine(model, name), x[order], y[order])
    assert not torch.allclose(moved, plain, rtol=1e-3)
    elsewhere = gradient(engine(model, name), x, y, index=[9, 8, 7, 6])
    assert not torch.allclose(elsewhere, plain, rtol=1e-3)


@pointwise
def test_unequal_counts(name: str, model: Net) -> None:
    unit, (x, y) = ESTIMATORS[name].unit, data()
    counts = [unit, 9 * unit, 2 * unit, unit]
    report = engine(model, name, allocator=Fixed(counts)).estimate(x, y)
    assert report.queries == 2 * sum(counts)
    for found in report.counts.values():
        assert found.tolist() == counts
