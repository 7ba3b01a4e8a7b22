"""JVP against autograd, its cost, and models that forward differentiation cannot pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flops import JVP, CoverageError, ForwardGradient, Group, NonFiniteLossError
from flops.estimators.jvp import WORK
from flops.perturb.random import fill
from flops.presets import jvp
from tests.conftest import exact, squared


class Language(nn.Module):
    """A table with padding that is tied to the head and read by a function, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recur = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = x + F.scaled_dot_product_attention(x, x, x)
        x = self.recur(x)[0]
        return (self.head(x) + F.linear(x, self.embed.weight).sin()).flatten(1)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.LayerNorm(12)
        self.scale, self.head = nn.Parameter(torch.ones(3, 1, 1)), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((self.conv(x).relu() * self.scale).flatten(1)))


def language() -> tuple[nn.Module, Tensor, Tensor]:
    ids = torch.tensor([[1, 2, 0], [3, 3, 4], [5, 0, 0], [6, 2, 1]])
    return Language().double(), ids, torch.randn(4, 21).double()


def image() -> tuple[nn.Module, Tensor, Tensor]:
    model = Image().double().to(memory_format=torch.channels_last)
    return model, torch.randn(4, 2, 4, 4).double(), torch.randn(4, 2).double()


@pytest.mark.parametrize("problem", [language, image])
@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize("options", [{}, {"chunk": 2}], ids=str)
def test_the_derivative_is_exact(problem: Any, noise: Any, options: dict[str, Any]) -> None:
    """(grad l . v) v with the gradient of autograd, as a mean over three directions."""
    model, x, y = problem()
    truth = exact(model, squared, x, y)
    model.zero_grad()
    named = dict(model.named_parameters())
    sizes, expected = [p.numel() for p in named.values()], dict.fromkeys(named, 0.0)
    for draw in range(3):
        row = fill(noise, (7, 0, 0, draw), torch.empty(sum(sizes))).double().split(sizes)
        v = {n: z.view(named[n].shape) for n, z in zip(named, row, strict=True)}
        slope = sum(float((truth[n] * v[n]).sum()) for n in named)
        expected = {n: expected[n] + slope * v[n] / 3 for n in named}
    held = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in named.items()}
    group = Group(parameters=list(named.values()), estimator=JVP(noise), queries=3)
    report = ForwardGradient(model, squared, group, seed=7, **options).estimate(x, y)
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-10)
        assert p is held[name][0]
        assert p.data_ptr() == held[name][1]
        assert torch.equal(p, held[name][2])
    assert report.loss == pytest.approx(float(squared(model(x), y).mean().detach()), rel=1e-12)
    assert report.queries == 3 * 4
    assert report.forward_equivalents.clean == 0
    assert report.forward_equivalents.queries == WORK * 3 * 4


def test_a_row_of_padding_has_no_tangent() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=2), nn.Flatten()).double()
    with torch.no_grad():
        model[0].weight[2] = 1.0  # else the loss would not depend on it
    ids, y = torch.tensor([[1, 2], [0, 2], [3, 4], [2, 1]]), torch.randn(4, 6).double()
    truth = exact(model, squared, ids, y)["0.weight"]
    v = fill("gaussian", (0, 0, 0, 0), torch.empty(5, 3)).double()
    v[2] = 0
    model.zero_grad()
    ForwardGradient(model, squared, jvp(model)).estimate(ids, y)
    torch.testing.assert_close(model[0].weight.grad, (truth * v).sum() * v)


def test_its_work_is_that_of_three_passes() -> None:
    """Counted: a product of weights and one of activations beside each of the forward pass."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))).double()
    x, y = torch.randn(16, 8).double(), torch.randn(16, 8).double()
    fg = ForwardGradient(model, squared, jvp(model))
    fg.inspect(x, y)
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        model(x)
    with FlopCounterMode(display=False) as lifted:
        fg.estimate(x, y)
    # The first layer's input has no tangent.
    assert lifted.get_total_flops() / plain.get_total_flops() == pytest.approx(WORK, rel=0.05)
    assert "3.00" in str(fg)


def test_what_ends_before_the_group_is_replayed() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), []
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    model[0].requires_grad_(False)
    fg = ForwardGradient(model, squared, Group(model[2], JVP(), 4))
    fg.inspect(x, y)
    model[0].register_forward_hook(lambda *_: calls.append(1))
    report = fg.estimate(x, y)
    assert report.forward_equivalents.clean == 3  # it pays to be replayed
    assert report.forward_equivalents.queries < WORK * 4 * 3 * 0.6
    assert len(calls) >= 1


class Double(torch.autograd.Function):
    """Without a forward derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Broken(nn.Module):
    """A linear layer, and what comes behind it."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(3, 4).double(), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


class Private(nn.Module):
    """Reads its matrix by a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).double())
        self.held = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held[0])


REFUSED = {
    "custom": (lambda: Broken(Double.apply), "a custom autograd.Function has no forward"),
    "operator": (
        lambda: Broken(nn.LSTM(4, 4)).float(),
        "the operator mkldnn_rnn_layer has no forward derivative.*use LikelihoodRatio",
    ),
    "detached": (lambda: Broken(torch.detach), "does not depend differentiably"),
    "private": (Private, "reads its parameter 'weight' by a reference of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_differentiated_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    model = make()
    dtype = next(model.parameters()).dtype
    if name == "operator" and not torch.backends.mkldnn.is_available():
        pytest.skip("another operator runs here")
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        return squared(outputs[0] if isinstance(outputs, tuple) else outputs, targets)

    fg = ForwardGradient(model, loss_fn, jvp(model))
    with pytest.raises(CoverageError, match=said):
        fg.estimate(torch.randn(5, 3, dtype=dtype), torch.randn(5, 4, dtype=dtype))
    for key, p in model.named_parameters():
        assert p is before[key][0]
        assert torch.equal(p, before[key][1])
        assert p.grad is None
    assert fg.steps == 0
    with forward_ad.dual_level():  # nothing is left open
        pass


def test_a_derivative_that_is_not_finite_names_its_points() -> None:
    model = Broken(lambda x: x)
    with torch.no_grad():
        model.linear.bias.zero_()
    x = torch.randn(4, 3).double()
    x[2] = 0

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().sum(1).sqrt()  # at 0: 0, with a derivative of 0 / 0

    fg = ForwardGradient(model, loss_fn, jvp(model), seed=1)
    with pytest.raises(NonFiniteLossError, match=r"derivatives of group 'jvp'.*points \[2\]"):
        fg.estimate(x, x)
    assert all(p.grad is None for p in model.parameters())


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="'orthogonal' is not one of"):
        JVP("orthogonal")
