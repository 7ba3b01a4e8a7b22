"""One contract for every estimator and every allocator, found by looking.

A new file in `flops.estimators` or `flops.allocators` is tested here without being named: each
class that has the members of the protocol, with its defaults and with each value of its options.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import io
import pickle
import pkgutil
import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flops.allocators
import flops.estimators
from flops import ForwardGradient, Group
from flops.allocators import Allocator, Fixed, Signal
from flops.estimators import Estimator
from flops.subspace.config import Shaping
from tests.conftest import flat, gradients, squared

SIZE, QUERIES = 4, 6


@pytest.fixture(autouse=True)
def shaped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without isotropic steps, so that one step shows shaped noise."""
    monkeypatch.setattr("flops.subspace.step.WARM", 0)


def classes(package: Any) -> Iterator[type]:
    """Every public class that is defined in a module of the package, but for protocols."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, found in vars(importlib.import_module(module.name)).items():
            defined_here = inspect.isclass(found) and found.__module__ == module.name
            if defined_here and not name.startswith("_") and not getattr(found, "_is_protocol", 0):
                yield found


def conforms(instance: Any, protocol: Any) -> bool:
    try:
        return isinstance(instance, protocol)
    except NotImplementedError:  # a base class that leaves a member open
        return False


def variants(cls: type) -> Iterator[tuple[str, Any]]:
    """The defaults, and each other value of each option that is a choice or a switch."""
    yield cls.__name__, cls()
    hints = get_type_hints(cls)
    if "shaping" in hints:
        yield f"{cls.__name__}-shaping", cls(shaping=Shaping())
        yield f"{cls.__name__}-unbiased", cls(shaping=Shaping(unbiased=True))
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        values = get_args(hint) if get_origin(hint) is Literal else ()
        for value in (False, True) if hint is bool else values:
            if value != field.default:
                yield f"{cls.__name__}-{field.name}={value}", cls(**{field.name: value})


def make_allocator(cls: type, size: int, queries: int = QUERIES) -> Any:
    """An allocator with its defaults, or from counts if it has none."""
    try:
        return cls()
    except TypeError:
        return cls([queries] * size)


def estimators() -> dict[str, Any]:
    found = {}
    for cls in classes(flops.estimators):
        try:
            instance = cls()
        except TypeError:  # it needs arguments: a binding or a result
            continue
        if conforms(instance, Estimator):
            found.update(variants(cls))
    return found


ESTIMATORS = estimators()
ALLOCATORS = {
    cls.__name__: cls
    for cls in classes(flops.allocators)
    if hasattr(cls, "allocate") and conforms(make_allocator(cls, SIZE), Allocator)
}
NOISY = [name for name, e in ESTIMATORS.items() if e.minimum_queries > 0]
POINTWISE = [name for name in NOISY if not ESTIMATORS[name].shared]
every = pytest.mark.parametrize("name", ESTIMATORS)
noisy = pytest.mark.parametrize("name", NOISY)
pointwise = pytest.mark.parametrize("name", POINTWISE)


def test_discovery_finds_what_is_exported() -> None:
    for exported in vars(flops.estimators).values():
        if inspect.isclass(exported) and hasattr(exported, "minimum_queries"):
            assert exported is Estimator or exported.__name__ in ESTIMATORS
    for exported in vars(flops.allocators).values():
        if inspect.isclass(exported) and hasattr(exported, "allocate"):
            protocol = getattr(exported, "_is_protocol", False)
            assert protocol or exported.__name__ in ALLOCATORS


class Net(nn.Module):
    """Two groups' worth of layers; whatever form the first one's output has is opened again."""

    def __init__(self, form: Any = None) -> None:
        super().__init__()
        self.first, self.second = Formed(form), nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Any:
        hidden = self.first(x)
        while not isinstance(hidden, Tensor):
            hidden = hidden["hidden"] if type(hidden) is dict else hidden[0]
        return torch.tanh(self.second(hidden)) + shift


class Formed(nn.Module):
    """Linear, tanh, LayerNorm, and a form for the output."""

    def __init__(self, form: Any = None) -> None:
        super().__init__()
        self.linear, self.norm, self.form = nn.Linear(3, 4), nn.LayerNorm(4), form

    def forward(self, x: Tensor) -> Any:
        out = self.norm(torch.tanh(self.linear(x)))
        return out if self.form is None else self.form(out)


def data(size: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3).double(), torch.randn(size, 2).double()


def groups(model: Net, estimator: Any) -> list[Group]:
    return [Group(m, estimator, QUERIES) for m in (model.first, model.second)]


def engine(model: Net, name: str, loss_fn: Any = squared, **options: Any) -> ForwardGradient:
    return ForwardGradient(model, loss_fn, groups(model, ESTIMATORS[name]), **options)


def gradient(fg: ForwardGradient, x: Any, y: Any, **options: Any) -> Tensor:
    """What one step adds to .grad, as one vector."""
    fg.model.zero_grad()
    fg.estimate(x, y, **options)
    return flat(gradients(fg.model))


def random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    return torch.get_rng_state().tolist(), str(numpy), random.getstate()


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
    assert fg.step == 2


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
@pytest.mark.bits
def test_the_global_random_state_does_not_matter(name: str, model: Net) -> None:
    x, y = data()
    found = []
    for seed in (None, 0, 1):
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        before = random_states()
        found.append(gradient(engine(model, name, seed=3), x, y))
        assert random_states() == before
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


@every
@pytest.mark.parametrize("form", [*FORMS, "ModelOutput"])
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


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype, model: Net) -> None:
    x, y = (t.to(dtype) for t in data())
    estimator = ESTIMATORS[name]
    if hasattr(estimator, "sigma"):
        estimator = dataclasses.replace(estimator, sigma=0.1)
    seen = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return squared(outputs, targets)

    model.to(dtype)
    fg = ForwardGradient(model, loss_fn, groups(model, estimator))
    fg.estimate(x, y)
    assert set(seen) == {dtype}  # the model itself is not widened
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()
    assert flat(gradients(model)).count_nonzero() > 0


@every
def test_half_precision_keeps_the_gradient(name: str, model: Net) -> None:
    x, y = data()
    estimator = ESTIMATORS[name]
    if hasattr(estimator, "sigma"):
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
    if hasattr(estimator, "sigma"):
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
    torch.testing.assert_close(tripled, 3 * plain, rtol=1e-6, atol=1e-8)


@every
@pytest.mark.bits
def test_with_an_index_the_order_of_points_does_not_matter(name: str, model: Net) -> None:
    (x, y), index = data(), torch.tensor([40, 7, 300, 2])
    order = torch.tensor([2, 0, 3, 1])
    here = gradient(engine(model, name), x, y, index=index)
    there = gradient(engine(model, name), x[order], y[order], index=index[order])
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-8)


@pointwise
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


# Allocators


def signal(size: int, unit: int, mean: int, **options: Any) -> Signal:
    losses = torch.linspace(0.1, 3, size)
    return Signal(losses, mean * size // unit * unit, unit, unit, "g", **options)


@pytest.mark.parametrize("index", [None, torch.arange(20)])
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_counts_fit_the_budget(name: str, size: int, unit: int, index: Tensor | None) -> None:
    before = random_states()
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
    assert random_states() == before


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("estimator", POINTWISE)
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
