"""One contract for every estimator and every allocator, found by looking.

A new file in `flops.estimators` or `flops.allocators` is tested without being named: each class
that has the members of the protocol, with its defaults and with each value of its options.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import flops.allocators
import flops.estimators
from flops import ForwardGradient, Group
from flops.allocators import Allocator
from flops.estimators import Estimator
from flops.subspace.config import Shaping
from tests.conftest import flat, gradients, squared

SIZE, QUERIES = 4, 6


def classes(package: Any) -> Iterator[type]:
    """Every public class that is defined in a module of the package, but for protocols."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, found in vars(importlib.import_module(module.name)).items():
            defined_here = inspect.isclass(found) and found.__module__ == module.name
            if defined_here and not name.startswith("_") and not getattr(found, "_is_protocol", 0):
                yield found


def variants(cls: type) -> Iterator[tuple[str, Any]]:
    """The defaults, and each other value of each option that is a choice or a switch."""
    hints, fields, make = get_type_hints(cls), dataclasses.fields(cls), partial(cls)
    given = {field.name for field in fields if field.init}
    if "score_draws" in given:  # hundreds of passes before the first step show no more than a few
        make = partial(cls, score_draws=4)
    yield cls.__name__, make()
    if "shaping" in given:
        # Without isotropic steps, so that one step shows shaped noise.
        yield f"{cls.__name__}-shaping", make(shaping=Shaping(warm=0))
        yield f"{cls.__name__}-unbiased", make(shaping=Shaping(unbiased=True, warm=0))
    for field in fields:
        hint = hints[field.name] if field.name in given else None
        values = get_args(hint) if get_origin(hint) is Literal else ()
        for value in (False, True) if hint is bool else values:
            if value != field.default:
                yield f"{cls.__name__}-{field.name}={value}", make(**{field.name: value})


def estimators() -> dict[str, Any]:
    found = {}
    for cls in classes(flops.estimators):
        try:
            instance = cls()
        except TypeError:  # it needs arguments: a binding or a result
            continue
        if isinstance(instance, Estimator):
            found.update(variants(cls))
    return found


ESTIMATORS = estimators()

ALLOCATORS = {
    cls.__name__: cls
    for cls in classes(flops.allocators)
    if issubclass(cls, Allocator) and not inspect.isabstract(cls)
}

NOISY = [name for name, e in ESTIMATORS.items() if e.minimum_queries > 0]

POINTWISE = [name for name in NOISY if not ESTIMATORS[name].shared]

every = pytest.mark.parametrize("name", ESTIMATORS)


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
