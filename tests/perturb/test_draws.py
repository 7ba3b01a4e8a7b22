"""Draws as keys and scalars: every way to use them gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops.perturb import draws as module
from flops.perturb.draws import Draws, DrawShape, shifted, squared_norm
from flops.perturb.low_rank import LowRank
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
        key, noise = (*draws.key, number), draws.noise
        row = fill("gaussian" if isinstance(noise, LowRank) else noise, key, torch.empty(size))
        sizes, parts = [p.numel() for p in draws.shape.parameters], []
        for place, (plain, p) in enumerate(
            zip(row.split(sizes), draws.shape.parameters, strict=True)
        ):
            z, wide, gain = plain, torch.promote_types(p.dtype, torch.float32), 1.0
            if isinstance(noise, LowRank) and p.dim() > 1:
                z, gain = low_rank(noise, key, place, p), 1 / noise.rank
            parts.append(z.view(p.shape).to(wide) * weight * gain)
        total = parts if not total else [a + b for a, b in zip(total, parts, strict=True)]
    for number, row in draws.shape.padding.items():
        total[number][row] = 0
    return total


def low_rank(noise: LowRank, key: tuple[int, ...], place: int, p: Tensor) -> Tensor:
    """U V^T of a matrix, as a whole."""
    seed, step, *rest = key
    u = fill("gaussian", (*key, place), torch.empty(len(p), noise.rank))
    kept = (seed, step // noise.interval, *rest, place, noise.interval)
    v = fill("gaussian", kept, torch.empty(p[0].numel(), noise.rank))
    return u @ v.T


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "signs": {"noise": "rademacher"},
    "low rank": {"noise": LowRank(3, 2)},
    "several": {"weights": (0.3, -2.0, 0.7)},
    "channels last": {"mixed": True},
    "low rank, several": {"noise": LowRank(1, 9), "weights": (0.3, -2.0), "padding": {2: 4}},
    "low rank, channels last": {"noise": LowRank(2, 1), "mixed": True},
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
    plain = len(draws.weights) == 1 and not isinstance(draws.noise, LowRank)
    tight = {"rtol": 0, "atol": 0} if plain else {"rtol": 1e-5, "atol": 1e-6}
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
@pytest.mark.parametrize("noises", [("gaussian", "gaussian"), (LowRank(2, 5), "rademacher")])
@pytest.mark.parametrize("turned", [False, True])
def test_earlier_gradients_are_added_with_their_factors(
    keep: int, noises: tuple[Any, Any], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP", keep)
    monkeypatch.setattr("flops.perturb.low_rank.PIECE", 30)  # pieces of unequal lengths
    now, before = noises[::-1] if turned else noises
    draws = made(now, dtype=torch.float64)
    other = Draws(before, (9, 9, 9), (0.5, 0.25), draws.shape)
    expected = [
        p.detach() + 2.0 * (a + 0.9 * b)
        for p, a, b in zip(draws.shape.parameters, reference(draws), reference(other), strict=True)
    ]
    with torch.no_grad():
        energy = draws.move(2.0, [(0.9, other)])
    for p, values in zip(draws.shape.parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), values, rtol=1e-5, atol=1e-6)
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


@pytest.mark.parametrize(
    "a",
    [
        torch.randn(300, 1001),
        torch.randn(300, 1001).T,
        torch.randn(7).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(0, 4).T,
        torch.randn(1, 5).expand(3, 5),
        torch.full((70_000,), 1e25),
        torch.full((70_000,), 1e-25),
    ],
)
def test_a_squared_norm_neither_overflows_nor_vanishes(a: Tensor) -> None:
    assert squared_norm(a) == pytest.approx(float(a.double().square().sum()), rel=1e-5)
