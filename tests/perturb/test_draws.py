"""Draws as keys and scalars: every way to use them gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops.perturb import draws as module
from flops.perturb.draws import Draws, DrawShape, shifted
from flops.perturb.random import fill

KEY = (3, 1, 4)


def parameters(dtype: torch.dtype, mixed: bool = False) -> tuple[nn.Parameter, ...]:
    """Of odd sizes, one longer than a piece."""
    shapes = [(7,), (140_001,), (13, 11), (), (2, 3, 5, 5)]
    found = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if mixed:
        found[-1] = found[-1].to(memory_format=torch.channels_last)
    return tuple(nn.Parameter(x) for x in found)


def reference(draws: Draws) -> list[Tensor]:
    """The sum by whole rows of noise."""
    size = sum(p.numel() for p in draws.shape.parameters)
    total: list[Tensor] = []
    for number, weight in enumerate(draws.weights):
        row = fill(draws.noise, (*draws.key, number), torch.empty(size))
        sizes, parts = [p.numel() for p in draws.shape.parameters], []
        for z, p in zip(row.split(sizes), draws.shape.parameters, strict=True):
            wide = torch.promote_types(p.dtype, torch.float32)
            parts.append(z.view(p.shape).to(wide) * weight)
        total = parts if not total else [a + b for a, b in zip(total, parts, strict=True)]
    for number, row in draws.shape.padding.items():
        total[number][row] = 0
    return total


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "signs": {"noise": "rademacher"},
    "several": {"weights": (0.3, -2.0, 0.7)},
    "channels last": {"mixed": True},
    "padding": {"padding": {2: 4}},
    "padding in a piece": {"padding": {1: 131_075}},
}


def made(
    noise: Any = "gaussian",
    weights: tuple[float, ...] = (-1.7,),
    dtype: torch.dtype = torch.float32,
    mixed: bool = False,
    padding: dict[int, int] | None = None,
) -> Draws:
    return Draws(noise, KEY, weights, DrawShape(parameters(dtype, mixed), padding or {}))


@pytest.mark.parametrize("keep", [0, 1 << 22], ids=["large", "small"])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_the_weighted_sum_of_its_noise(
    case: str, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP", keep)
    draws = made(**CASES[case])
    assert draws.shape.small == (bool(keep) and not ({"mixed", "padding"} & CASES[case].keys()))
    found = list(draws.gradients())
    assert [p for p, *_ in found] == list(draws.shape.parameters)
    tight = {"rtol": 0, "atol": 0} if len(draws.weights) == 1 else {"rtol": 1e-5, "atol": 1e-6}
    for (p, gradient, energy), expected in zip(found, reference(draws), strict=True):
        torch.testing.assert_close(gradient, expected, **tight)
        assert gradient.dtype == torch.promote_types(p.dtype, torch.float32)
        assert gradient.stride() == p.stride()
        assert energy == pytest.approx(float(expected.double().square().sum()), rel=1e-5)


@pytest.mark.parametrize("keep", [0, 1 << 22], ids=["large", "small"])
@pytest.mark.parametrize("case", CASES)
def test_a_move_adds_the_gradient(case: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP", keep)
    draws = made(**CASES[case])
    before = [p.detach().clone() for p in draws.shape.parameters]
    gradients = [gradient for _, gradient, _ in draws.gradients()]
    with torch.no_grad():
        energy = draws.move(-0.1)
        for data, gradient in zip(before, gradients, strict=True):
            data.add_(gradient, alpha=-0.1)
    for p, expected in zip(draws.shape.parameters, before, strict=True):
        assert torch.equal(p, expected)
    total = sum(float(g.double().square().sum()) for g in gradients)
    assert energy == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("keep", [0, 1 << 22], ids=["large", "small"])
def test_earlier_gradients_are_added_with_their_factors(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP", keep)
    draws = made(dtype=torch.float64)
    other = Draws("gaussian", (9, 9, 9), (0.5, 0.25), draws.shape)
    expected = [
        p.detach() + 2.0 * (a + 0.9 * b)
        for p, a, b in zip(draws.shape.parameters, reference(draws), reference(other), strict=True)
    ]
    with torch.no_grad():
        energy = draws.move(2.0, [(0.9, other)])
    for p, values in zip(draws.shape.parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), values, rtol=1e-6, atol=1e-7)
    own = sum(float(g.square().sum()) for g in reference(draws))
    assert energy == pytest.approx(own, rel=1e-6)  # that of this gradient alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shifted_leaves_the_data_and_the_padding(dtype: torch.dtype, layout: Any) -> None:
    data = torch.randn(5, 4, 3, 3, dtype=dtype).to(memory_format=layout)
    before = data.clone()
    z = fill("gaussian", KEY, torch.empty(5, 4, 3, 3), offset=17)
    shape = DrawShape((nn.Parameter(torch.empty(17)), nn.Parameter(data)))
    found = shifted(data, shape.pieces("gaussian", KEY, 1), 0.5, padding=2)
    expected = (data.to(torch.promote_types(dtype, torch.float32)) + 0.5 * z).to(dtype)
    expected[2] = data[2]
    torch.testing.assert_close(found, expected)
    assert torch.equal(data, before)
    assert found.dtype == dtype
