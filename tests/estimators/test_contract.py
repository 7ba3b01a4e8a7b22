"""What every estimator keeps to: gradients, hooks, random state, forms of inputs and outputs."""

from __future__ import annotations

import copy
import inspect
import io
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flops.allocators
import flops.estimators
from flops import ForwardGradient, Group
from flops.estimators import Estimator
from tests.conftest import flat, gradients, squared
from tests.support.contract import (
    ALLOCATORS,
    ESTIMATORS,
    NOISY,
    QUERIES,
    SIZE,
    Net,
    data,
    engine,
    every,
    gradient,
)
from tests.support.covering import in_turn
from tests.support.random_state import global_random_state

noisy = pytest.mark.parametrize("name", NOISY)


def test_discovery_finds_what_is_exported() -> None:
    for exported in vars(flops.estimators).values():
        if inspect.isclass(exported) and hasattr(exported, "minimum_queries"):
            assert exported is Estimator or exported.__name__ in ESTIMATORS
    for exported in vars(flops.allocators).values():
        if inspect.isclass(exported) and hasattr(exported, "allocate"):
            assert inspect.isabstract(exported) or exported.__name__ in ALLOCATORS


@pytest.fixture
def model() -> Net:
    return Net().double()


# Estimators


@every
def test_a_step(name: str, model: Net) -> None:
    (x, y), fg = data(), engine(model, name)
    before = copy.deepcopy(model.state_dict())
    fg.estimate(x, y)  # some estimators make extra queries in their first step, and say so
    report = fg.estimate(x, y)
    assert report.loss == pytest.approx(float(squared(model(x), y).mean().detach()), rel=1e-12)
    assert report.queries == sum(int(counts.sum()) for counts in report.counts.values())
    if name in NOISY:
        assert report.queries == 2 * QUERIES * SIZE
    assert report.forward_equivalents > 0
    assert report.forward_equivalents.probe == 0
    assert set(report.snr) == set(report.counts) == {"first", "second"}
    assert all(snr >= 0 for snr in report.snr.values())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert fg.steps == 2


@every
def test_gradients_accumulate_in_place(name: str, model: Net) -> None:
    x, y = data()
    alone = gradient(engine(model, name), x, y)
    model.zero_grad()
    held = {}
    for key, parameter in model.named_parameters():
        parameter.grad = held[key] = torch.randn_like(parameter)
    before = flat(gradients(model))
    engine(model, name).estimate(x, y)
    torch.testing.assert_close(flat(gradients(model)), before + alone)
    assert all(parameter.grad is held[key] for key, parameter in model.named_parameters())


@every
def test_gradients_are_the_users_own(name: str, model: Net) -> None:
    x, y = data()
    engine(model, name).estimate(x, y)
    found = [p.grad for p in model.parameters()]
    assert len({g.data_ptr() for g in found}) == len(found)
    for parameter in model.parameters():
        assert parameter.grad.is_leaf
        assert not parameter.grad.is_inference()
        assert not parameter.grad.requires_grad
        assert parameter.grad.stride() == parameter.stride()
        parameter.grad.mul_(2)


class Sum(nn.Module):
    """Two parameters for which autograd hands out one and the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(3).double()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a + self.b)


@every
def test_two_parameters_never_share_a_gradient(name: str) -> None:
    model, (x, _) = nn.Sequential(Sum(), nn.Tanh()), data()
    fg = ForwardGradient(model, squared, Group(model[0], ESTIMATORS[name], QUERIES))
    fg.estimate(x, torch.zeros_like(x))
    left, right = model[0].a.grad, model[0].b.grad
    before = right.clone()
    left.add_(1)
    assert torch.equal(right, before)


@every
def test_the_users_hooks_stay_and_count(name: str, model: Net) -> None:
    x, y = data()
    plain = gradient(engine(model, name), x, y)
    doubled = model.second.register_forward_hook(lambda module, args, out: 2 * out)
    hooked = gradient(engine(model, name), x, y)
    assert list(model.second._forward_hooks) == [doubled.id]
    assert not torch.allclose(hooked, plain, rtol=1e-3)
    doubled.remove()
    assert torch.equal(gradient(engine(model, name), x, y), plain)


@every
def test_frozen_parameters_get_no_gradient(name: str, model: Net) -> None:
    model.first.linear.weight.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    engine(model, name).estimate(*data())
    for key, parameter in model.named_parameters():
        frozen = key in ("first.linear.weight", "second.bias")
        assert (parameter.grad is None) == frozen, key


@every
def test_the_global_random_state_does_not_matter(name: str, model: Net) -> None:
    x, y = data()
    found = []
    for seed in (None, 0, 1):
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        before = global_random_state()
        found.append(gradient(engine(model, name, seed=3), x, y))
        assert global_random_state() == before
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@noisy
def test_seeds_and_steps_are_the_key_of_the_noise(name: str, model: Net) -> None:
    x, y = data()
    fg = engine(model, name, seed=3)
    first, second = gradient(fg, x, y), gradient(fg, x, y)
    assert torch.equal(first, gradient(engine(model, name, seed=3), x, y))
    assert not torch.allclose(first, second, rtol=1e-3)
    assert not torch.allclose(first, gradient(engine(model, name, seed=4), x, y), rtol=1e-3)


@noisy
def test_groups_have_different_noise(name: str) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 5), nn.Linear(3, 5)
            self.right.load_state_dict(self.left.state_dict())

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    twins = Twins().double()
    estimator = ESTIMATORS[name]
    both = [Group(twins.left, estimator, QUERIES), Group(twins.right, estimator, QUERIES)]
    x, _ = data()
    ForwardGradient(twins, squared, both).estimate(x, torch.randn(SIZE, 5).double())
    assert not torch.allclose(twins.left.weight.grad, twins.right.weight.grad, rtol=1e-3)


@every
def test_inputs_as_tensor_tuple_or_dict(name: str, model: Net) -> None:
    x, y = data()
    plain = gradient(engine(model, name), x, y)
    zeros = torch.zeros(1, 2).double()
    for inputs in ((x,), {"x": x}, (x, zeros), {"shift": 0.0, "x": x}):
        torch.testing.assert_close(gradient(engine(model, name), inputs, y), plain)


class Pair(NamedTuple):
    hidden: Tensor
    note: None


FORMS = {
    "tuple": lambda out: (out, None),
    "list": lambda out: [out],
    "dict": lambda out: {"hidden": out},
    "named tuple": lambda out: Pair(out, None),
}


def model_output(out: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=out)


@pytest.mark.parametrize(
    ("name", "form"), in_turn(ESTIMATORS, [*FORMS, "ModelOutput"], full=["LikelihoodRatio"])
)
def test_outputs_of_any_form(name: str, form: str, model: Net) -> None:
    if form == "ModelOutput":
        pytest.importorskip("transformers")
    formed = Net(model_output if form == "ModelOutput" else FORMS[form]).double()
    formed.load_state_dict(model.state_dict())
    x, y = data()
    plain = gradient(engine(model, name), x, y)
    torch.testing.assert_close(gradient(engine(formed, name), x, y), plain)


@every
def test_a_short_last_batch_and_a_single_point(name: str, model: Net) -> None:
    fg = engine(model, name)
    first = fg.estimate(*data(SIZE))
    assert first.forward_equivalents.probe > 0
    for size in (3, 2, 1):
        report = fg.estimate(*data(size))
        assert report.forward_equivalents.probe == 0
        assert all(len(counts) == size for counts in report.counts.values())
    alone = engine(model, name)
    report = alone.estimate(*data(1))
    # Backpropagation brings its own forward pass.
    assert report.forward_equivalents.clean == (0 if name == "Exact" else 1)
    assert flat(gradients(model)).isfinite().all()


@every
@pytest.mark.bits
def test_a_state_survives_a_file(name: str, model: Net) -> None:
    x, y = data()
    fg = engine(model, name, seed=3)
    for _ in range(2):
        fg.estimate(x, y)
    file = io.BytesIO()
    torch.save(fg.state_dict(), file)
    file.seek(0)
    resumed = engine(model, name, seed=99)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.state_dict()["step"] == 2
    for _ in range(2):
        assert torch.equal(gradient(resumed, x, y), gradient(fg, x, y))
