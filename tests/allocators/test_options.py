"""Options of allocators: their defaults, and the bounds of what is accepted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman
from flops.errors import QueryError
from tests.support.allocation import signal

DEFAULTS = [
    "Equal()",
    "Bernoulli(p=0.5, min_queries=1, samples=32)",
    "Gaussian(feature='tanh', kernel=True, pilot=0, min_queries=1, samples=32, iterations=10, "
    "interval=1, learning_rate=0.1)",
    "Neyman(pilot=0, min_queries=1, running=False, shrink=True, across_groups=False)",
]
CLASSES: dict[str, Any] = {cls.__name__: cls for cls in (Equal, Bernoulli, Gaussian, Neyman)}


@pytest.mark.parametrize("shown", DEFAULTS, ids=lambda shown: shown.partition("(")[0])
def test_defaults_are_what_is_documented(shown: str) -> None:
    """Exactly the options that are shown can be given; what is learned is none of them."""
    cls = CLASSES[shown.partition("(")[0]]
    assert repr(cls()) == shown
    given = inspect.signature(cls).parameters.values()
    assert {p.name: p.default for p in given} == {p.name: getattr(cls(), p.name) for p in given}
    assert all(f"{p.name}={p.default!r}" in shown for p in given)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Bernoulli, {"p": -0.01}, "between 0 and 1"),
        (Bernoulli, {"p": 1.01}, "between 0 and 1"),
        (Bernoulli, {"samples": 3}, "samples >= 4"),
        (Bernoulli, {"min_queries": -1}, "min_queries >= 0"),
        (Gaussian, {"feature": "log"}, "'log' is not one of"),
        (Gaussian, {"samples": 3}, "samples >= 4"),
        (Gaussian, {"iterations": 0}, "iterations >= 1"),
        (Gaussian, {"interval": 0}, "interval >= 1"),
        (Gaussian, {"pilot": -1}, "must not be negative"),
        (Gaussian, {"min_queries": -1}, "must not be negative"),
        (Neyman, {"pilot": -1}, "must not be negative"),
        (Neyman, {"min_queries": -1}, "must not be negative"),
        (Neyman, {"shrink": False}, "set pilot to 2 or more"),
    ],
)
def test_other_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Bernoulli, {"p": 0.0}),
        (Bernoulli, {"p": 1.0}),
        (Bernoulli, {"p": None, "samples": 4, "min_queries": 0}),
        (Gaussian, {"samples": 4, "iterations": 1, "interval": 1, "pilot": 0, "min_queries": 0}),
        (Neyman, {"pilot": 0, "min_queries": 0}),
        (Neyman, {"shrink": False, "pilot": 1}),
    ],
)
def test_the_least_of_every_option_is_accepted(cls: Any, options: dict[str, Any]) -> None:
    made = cls(**options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    "counts", [2, 2.5, [1.0, 2.0], [[1, 2]], ["a", "b"], [[1], [2, 3]], torch.tensor([True])]
)
def test_fixed_counts_are_one_whole_number_per_point(counts: Any) -> None:
    with pytest.raises(QueryError, match="one whole number per point"):
        Fixed(counts)


def test_fixed_counts_fit_the_batch_and_the_unit() -> None:
    batch = signal(torch.rand(2), 4, unit=2, minimum=2)
    assert Fixed([2, 6]).allocate(batch).tolist() == [2, 6]
    assert Fixed(torch.tensor([2, 6], dtype=torch.int32)).allocate(batch).dtype == torch.long
    for counts, message in (([2], "1 counts were given"), ([2, 3], "multiples"), ([4, 0], "least")):
        with pytest.raises(QueryError, match=message):
            Fixed(counts).allocate(batch)


def test_many_fixed_counts_are_summed_up() -> None:
    assert repr(Fixed(list(range(1, 9)))) == "Fixed([1, 2, 3, 4, 5, 6, 7, 8])"
    assert repr(Fixed(list(range(1, 10)))) == "Fixed(9 counts of 1 to 9)"
