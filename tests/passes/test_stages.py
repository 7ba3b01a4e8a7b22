"""Stages and targets that something passes by are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops import SPSA, CoverageError, ForwardGradient, Group, LikelihoodRatio
from tests.conftest import gradients, squared
from tests.support.replaying import UNet, stack, stateful


def test_stage_with_a_skip_connection_past_its_end_is_refused() -> None:
    model, x, y = UNet(), torch.randn(3, 4), torch.randn(3, 2)
    stage = LikelihoodRatio(targets="stage")
    rest = [
        Group(["middle", "up2", "up1"], LikelihoodRatio(), name="rest"),
        Group(["down1", "down2"], stage, name="stage"),
    ]
    with pytest.raises(CoverageError, match=r"'stage'.*output of \['down2'\].*skip"):
        ForwardGradient(model, squared, rest).estimate(x, y)


def test_target_whose_parameters_act_past_its_output_is_refused() -> None:
    """An attribute that a later module reads carries part of the gradient."""
    model, x, y = stateful(), torch.randn(3, 4), torch.randn(3, 2)
    rest = Group(["1", "2"], LikelihoodRatio(), name="rest")
    groups = [Group("0", LikelihoodRatio(), name="notes"), rest]
    with pytest.raises(CoverageError, match=r"'notes'.*output of \['0'\].*attribute"):
        ForwardGradient(model, squared, groups).estimate(x, y)
    ForwardGradient(model, squared, [Group("0", SPSA(), name="notes"), rest]).estimate(x, y)


class Gap(nn.Module):
    """Between the modules of the stage stand a table and a lookup that only the stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.table = nn.Embedding(1, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) + self.table(torch.zeros(1, dtype=torch.long))
        return self.head(torch.tanh(self.b(x)))


def test_what_only_the_stage_reads_is_no_skip_connection() -> None:
    model, x, y = Gap().double(), torch.randn(3, 4).double(), torch.randn(3, 2).double()
    stage = LikelihoodRatio(targets="stage", sigma=1e-6, noise="orthogonal")
    ForwardGradient(
        model, squared, [Group(["a", "b"], stage, 4), Group("head", stage, 2, name="head")]
    ).estimate(x, y)
    found = gradients(model)
    model.zero_grad()
    squared(model(x), y).mean().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_stage_around_another_groups_module_is_refused() -> None:
    model, x, y = stack(), torch.randn(3, 4), torch.randn(3, 2)
    stage = LikelihoodRatio(targets="stage")
    groups = [Group(["0", "4"], stage, name="stage"), Group(["2", "5"], stage, name="other")]
    with pytest.raises(CoverageError, match=r"'stage'.*'2' runs between"):
        ForwardGradient(model, squared, groups).estimate(x, y)


class Layer(nn.Module):
    """Counts how often it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.runs += 1
        return x + self.b(torch.tanh(self.a(x))) * scale


class Deep(nn.Module):
    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean(2, keepdim=True)
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x.mean(1))


def test_a_large_stage_computes_its_layers_again_and_has_the_same_gradient() -> None:
    """Its activations with four points are above what is kept, with two below."""
    model = Deep(16).double()
    model.head.requires_grad_(False)
    x, y = torch.randn(4, 12_000, 16).double(), torch.randn(4, 2).double()
    groups = [Group(list(model.layers), LikelihoodRatio(targets="stage"), 1)]
    found, runs, cost = {}, {}, {}
    for chunk in (4, 2):
        fg = ForwardGradient(model, squared, groups, chunk=chunk)
        fg.estimate(x, y)
        model.zero_grad()
        for layer in model.layers:
            layer.runs = 0
        cost[chunk] = fg.estimate(x, y).forward_equivalents.local
        found[chunk] = gradients(model)
        runs[chunk] = [layer.runs for layer in model.layers]
        model.zero_grad()
    for name, gradient in found[2].items():
        torch.testing.assert_close(found[4][name], gradient, rtol=1e-9, atol=1e-12)
    # A clean pass and two local ones (one for the variance), which run all but the last twice.
    assert runs[4] == [5, 5, 5, 3]
    assert runs[2] == [5, 5, 5, 5]  # two chunks of each pass but the clean one
    assert cost[4] == pytest.approx(cost[2] + 2 * 4 * 3 / 4, rel=0.02)


def test_hooks_get_the_gradients_of_a_large_stage_one_by_one() -> None:
    """The optimizer may step each parameter while earlier layers are still to be computed again."""
    x, y = torch.randn(4, 12_000, 16).double(), torch.randn(4, 2).double()
    found = []
    for hooks in (False, True):
        torch.manual_seed(0)
        model = Deep(16).double()
        model.head.requires_grad_(False)
        order: list[int] = []

        def step(p: nn.Parameter, order: list[int] = order) -> None:
            order.append(id(p))
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None

        layers = list(model.layers.parameters())
        if hooks:
            for p in layers:
                p.register_post_accumulate_grad_hook(step)
        groups = [Group(list(model.layers), LikelihoodRatio(targets="stage"), 1)]
        ForwardGradient(model, squared, groups).estimate(x, y)
        if not hooks:
            for p in layers:
                step(p)
        else:
            assert order[0] in {id(p) for p in model.layers[-1].parameters()}
            assert order[-1] in {id(p) for p in model.layers[0].parameters()}
            assert all(p.grad is None for p in layers)
        found.append([p.detach().clone() for p in layers])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Cache:
    """Holds what the layers computed, like keys and values for tokens to come."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Caching(Layer):
    def forward(self, x: Tensor, *, cache: Cache) -> Tensor:  # type: ignore[override]
        if id(self) in cache.seen:
            raise RuntimeError("the cache is extended twice")
        cache.seen.append(id(self))
        return super().forward(x, scale=x.new_ones(()))


class Generator(Deep):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(Caching(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return self.head(x.mean(1))


def test_a_layer_that_changes_an_argument_is_not_computed_again() -> None:
    model = Generator(16).double()
    model.head.requires_grad_(False)
    x, y = torch.randn(4, 12_000, 16).double(), torch.randn(4, 2).double()
    groups = [Group(list(model.layers), LikelihoodRatio(targets="stage"), 1)]
    ForwardGradient(model, squared, groups).estimate(x, y)
    assert set(gradients(model)) == {n for n, p in model.named_parameters() if p.requires_grad}
