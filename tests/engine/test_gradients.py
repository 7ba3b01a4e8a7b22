"""The second phase: hooks that step and free a parameter as its gradient appears."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    ES,
    FZOO,
    JVP,
    LOZO,
    SPSA,
    DeepZero,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    MeZO,
    Shaping,
)
from flops.allocators import Gaussian, Neyman
from tests.conftest import squared
from tests.support.covering import in_turn


class Tied(nn.Module):
    """Residual blocks of which two share a matrix, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4)
        )
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ESTIMATORS = {
    "leaf": LikelihoodRatio(targets="leaf"),
    "block": LikelihoodRatio(),
    "pairs": LikelihoodRatio(baseline="antithetic"),
    "shaped": LikelihoodRatio(shaping=Shaping()),
    "es": ES(),
    "spsa": SPSA(),
    "mezo": MeZO(),
    "fzoo": FZOO(),
    "lozo": LOZO(),
    "jvp": JVP(),
    "deepzero": DeepZero(score_draws=2),
    "exact": Exact(),
}


def groups(model: Tied, estimator: Any, crossed: bool) -> list[Group]:
    """Two groups in a row, or with their blocks in turn: then each one's pass runs the other's."""
    if estimator.whole_model:
        return [Group(model, estimator, name="all")]
    order = [0, 2, 1, 3] if crossed else [0, 1, 2, 3]
    blocks = [model.blocks[i] for i in order]
    return [
        Group(blocks[:2], estimator, 8, name="first"),
        Group([*blocks[2:], model.head], estimator, 8, name="second"),
    ]


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return (
        torch.randn(6, 5, generator=source).double(),
        torch.randn(6, 2, generator=source).double(),
    )


@pytest.mark.parametrize("crossed", [False, True], ids=["in a row", "crossed"])
@pytest.mark.parametrize(
    ("name", "options"), in_turn(ESTIMATORS, [{}, {"reuse": False}, {"chunk": 4}]), ids=str
)
def test_stepping_in_hooks_is_stepping_after_all(
    name: str, crossed: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = Tied().double()
    hooked = copy.deepcopy(plain)
    results = []
    for model, with_hooks in ((plain, False), (hooked, True)):
        fg = ForwardGradient(model, squared, groups(model, ESTIMATORS[name], crossed), **options)
        calls: list[nn.Parameter] = []

        def step(parameter: nn.Parameter, calls: list[nn.Parameter] = calls) -> None:
            calls.append(parameter)
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        if with_hooks:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            report = fg.estimate(*data())
            if not with_hooks:
                for parameter in model.parameters():
                    step(parameter)
        results.append((dict(model.named_parameters()), report))
        assert len(calls) == 3 * len(list(model.parameters()))  # once a step, tied ones too
        assert all(p.grad is None for p in model.parameters())
    for parameter, expected in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)
    assert results[0][1].snr == pytest.approx(results[1][1].snr)


@pytest.mark.parametrize("allocator", [Gaussian(pilot=2), Neyman(pilot=2)], ids=["ga", "neyman"])
def test_hooks_see_the_whole_gradient_behind_a_pilot(allocator: Any) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    fg = ForwardGradient(
        model, squared, groups(model, LikelihoodRatio(), False), allocator=allocator
    )
    twin = copy.deepcopy(fg)
    fg.estimate(*data())
    seen: dict[str, Tensor] = {}
    for n, p in twin.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=n: seen.update({n: p.grad.clone()}))
    twin.estimate(*data())
    for n, p in model.named_parameters():
        torch.testing.assert_close(seen[n], p.grad, rtol=1e-9, atol=1e-12)


def test_gradients_of_micro_batches_add_up() -> None:
    """With `scale`, their sum is the gradient of the whole batch."""
    torch.manual_seed(0)
    model, (x, y) = Tied().double(), data()
    exact = [Group(model, Exact(), 1)]
    ForwardGradient(model, squared, exact).estimate(x, y)
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    fg = ForwardGradient(model, squared, exact)
    fg.estimate(x[:2], y[:2], scale=2 / 6)
    fg.estimate(x[2:], y[2:], scale=4 / 6)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[n])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_scale_scales_and_changes_nothing_else(name: str) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    found = []
    for scale in (1.0, 0.25):
        model.zero_grad()
        fg = ForwardGradient(model, squared, groups(model, ESTIMATORS[name], False))
        report = fg.estimate(*data(), scale=scale)
        found.append(([p.grad.clone() for p in model.parameters()], report.snr))
    for whole, part in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(0.25 * whole, part)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_bad_scale_is_refused(scale: Any) -> None:
    model = Tied().double()
    fg = ForwardGradient(model, squared)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        fg.estimate(*data(), scale=scale)


def test_the_table_says_what_is_perturbed_and_what_it_costs() -> None:
    model = Tied().double()
    fg = ForwardGradient(model, squared, groups(model, LikelihoodRatio(), False))
    before = str(fg)
    assert "first" in before
    assert "?" in before
    after = str(fg.inspect(*data()))
    assert "?" not in after
    assert "blocks.0 .. blocks.1 (2)" in after
    assert "forward passes per point" in after
    assert repr(fg) == "ForwardGradient(Tied, groups=['first', 'second'], steps=0)"
    assert all(p.grad is None for p in model.parameters())


class Positioned(nn.Module):
    """A parameter that the model's own forward adds between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.w = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.c(x) + self.w)))


def test_what_runs_between_replayed_calls_reads_unstepped_parameters() -> None:
    torch.manual_seed(0)
    plain = Positioned().double()
    plain.unused.requires_grad_(False)
    hooked = copy.deepcopy(plain)
    for model, with_hooks in ((plain, False), (hooked, True)):
        groups = [
            Group([model.a, model.b], LikelihoodRatio(), 8, name="ab"),
            Group(model.c, LikelihoodRatio(), 8, name="c"),
            Group(parameters=[model.w], estimator=SPSA(shared=True), queries=8, name="w"),
        ]
        fg = ForwardGradient(model, squared, groups)
        if with_hooks:
            for p in model.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(10 * p.grad))
        fg.estimate(*data())
        if not with_hooks:
            for p in model.parameters():
                if p.grad is not None:
                    p.data.sub_(10 * p.grad)
    for a, b in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_nobody_is_called_for_a_parameter_without_a_gradient() -> None:
    model, called = Positioned().double(), list[nn.Parameter]()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(called.append)
    ForwardGradient(model, squared, Group(model, Exact())).estimate(*data())
    assert len(called) == len(list(model.parameters())) - 1
    assert not any(p is model.unused for p in called)


def test_hooks_may_draw_random_numbers_and_write_in_place() -> None:
    """As in a backward pass: without gradients, and with random numbers of the user's own."""
    model = Tied().double()
    stage = LikelihoodRatio(targets="stage")
    groups = [
        Group(list(model.blocks[:2]), stage, 8, name="first"),
        Group(list(model.blocks[2:]), stage, 8, name="second"),
        Group(model.head, stage, 8, name="head"),
    ]
    drawn: list[float] = []

    def hook(parameter: nn.Parameter) -> None:
        drawn.append(float(torch.rand(1)))
        parameter.sub_(0.1 * parameter.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    fg = ForwardGradient(model, squared, groups)
    torch.manual_seed(5)
    fg.estimate(*data())
    fg.estimate(*data())
    torch.manual_seed(5)
    assert drawn == [float(torch.rand(1)) for _ in drawn]
    assert len(set(drawn)) == len(drawn)
