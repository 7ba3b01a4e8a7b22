"""Prefix replay changes nothing but the cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import CoverageError, ForwardGradient, Group, LikelihoodRatio
from flops.passes.guards import slow_attention_path
from tests.conftest import cosine, estimate, exact, flat, gradients, squared
from tests.support.replaying import ESTIMATORS, UNet, stack, stateful
from tests.support.zoo import CASES, classes, vit_model


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x -= 1  # writes into the input of the model
        h = self.a(x)
        out = self.b(self.relu(h))
        out += h
        return self.c(torch.nn.functional.silu(out, inplace=True).mul_(2))


class EarlyAndLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(self.norm(x)))
        return self.head(torch.tanh(self.b(self.norm(x))) + self.norm(x * 2))


class Experts(nn.Module):
    """The data decides which experts run, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = x.abs().argmax(1) % 3
        out = torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = choice == number
            out[rows] = self.experts[number](x[rows])
        return out


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Experts(), nn.Tanh(), nn.Linear(4, 2))


class Remembering(nn.Module):
    """Computes its frozen features without any gradient bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            features = self.frozen(x)
        return self.b(torch.tanh(self.a(features.clone())))


class Table(nn.Module):
    """Writes into a table that all points share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(torch.zeros(1, dtype=torch.long))
        h = torch.tanh(self.a(x))
        table.mul_(3)
        return self.b(h + table)


MODELS: dict[str, tuple[Any, list[list[str]]]] = {
    "stack": (stack, [["0"], ["2", "4"], ["5"]]),
    "u-net": (UNet, [["down1"], ["down2", "middle"], ["up2", "up1"]]),
    "stateful": (stateful, [["0.linear"], ["1"], ["2"]]),
    "in-place": (Inplace, [["a"], ["b"], ["c"]]),
    "early and late": (EarlyAndLate, [["a"], ["norm"], ["b", "head"]]),
    "mixture": (mixture, [["0"], ["1"], ["3"]]),
    "in-place table": (Table, [["table"], ["a"], ["b"]]),
    "inference": (Remembering, [["a"], ["b"]]),
}


def run(name: str, estimator: Any, reuse: bool, **options: Any) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    make, parts = MODELS[name]
    model = make().double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    groups = [Group(part, estimator, 4, name=part[0]) for part in parts]
    fg = ForwardGradient(model, squared, groups, reuse=reuse, **options)
    report = fg.estimate(x.clone(), y)
    truth = squared(model(x.clone()), y).detach()
    near = 1e-12 if report.forward_equivalents.clean else 1e-3  # of the queries, without a pass
    assert report.loss == pytest.approx(float(truth.mean()), rel=near)
    return gradients(model), report


# Experts are no targets of their own; see the next test.
PAIRS = [(n, k) for n in MODELS for k in ESTIMATORS if (n, k) != ("mixture", "leaf")]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.bits
def test_reuse_changes_nothing_but_the_cost(name: str, kind: str) -> None:
    plain, dear = run(name, ESTIMATORS[kind], reuse=False)
    for chunk in (None, 6):  # six rows: as many as the batch has
        reused, cheap = run(name, ESTIMATORS[kind], reuse=True, chunk=chunk)
        assert set(reused) == set(plain)
        for parameter in plain:
            torch.testing.assert_close(reused[parameter], plain[parameter], rtol=1e-7, atol=1e-9)
        assert dear.forward_equivalents.queries == dear.queries
        assert cheap.forward_equivalents.queries <= dear.queries
        if name != "stateful":
            assert cheap.forward_equivalents.queries < 0.9 * dear.queries


def test_experts_that_run_for_some_data_only_are_no_targets() -> None:
    with pytest.raises(CoverageError, match=r"1\.experts\.\d.*give the module around it"):
        run("mixture", LikelihoodRatio(targets="leaf"), reuse=True)


@pytest.mark.parametrize("name", ["u-net", "stateful", "in-place", "early and late", "mixture"])
def test_reused_gradients_point_to_the_exact_one(name: str) -> None:
    """Noise that spans each target: not only alike with and without reuse, but right."""
    torch.manual_seed(0)
    make, parts = MODELS[name]
    model = make().double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    estimator = LikelihoodRatio(sigma=1e-5)
    groups = [Group(n, estimator, 3000, name=n) for part in parts for n in part]
    ForwardGradient(model, squared, groups).estimate(x.clone(), y)
    found = flat(gradients(model))
    model.zero_grad()
    squared(model(x.clone()), y).mean().backward()
    assert cosine(found, flat(gradients(model))) > 0.99


COSTS = {"leaf": (1, 2 / 3, 1 / 3), "block": (5 / 6, 1 / 2, 1 / 6), "stage": (2 / 3, 1 / 3, 0)}


@pytest.mark.parametrize("targets", COSTS)
def test_cost_of_queries_on_six_layers(targets: Any) -> None:
    model = vit_model(layers=6, hidden=32, size=12, mlp=128).float()
    model.vit.embeddings.requires_grad_(False)
    model.vit.layernorm.requires_grad_(False)
    model.classifier.requires_grad_(False)
    x, y = torch.randn(2, 1, 12, 12), torch.tensor([0, 1])
    for third, expected in enumerate(COSTS[targets]):
        for number, layer in enumerate(model.vit.layers):
            layer.requires_grad_(number // 2 == third)
        layers = list(model.vit.layers)[2 * third : 2 * third + 2]
        groups = [Group(layers, LikelihoodRatio(targets=targets), 8)]
        report = ForwardGradient(model, classes, groups).estimate(x, y)
        assert report.queries == 16
        assert report.forward_equivalents.queries / 16 == pytest.approx(expected, abs=0.03)


def test_encoder_layers_are_the_same_in_every_pass() -> None:
    """The fused path of eval mode skips submodules: off alike in all passes, then on again."""
    case = CASES["encoder"]()
    with slow_attention_path(), torch.no_grad():
        truth = case.losses().mean()
    enabled = torch.backends.mha.get_fastpath_enabled()
    report = ForwardGradient(case.model, case.loss_fn).estimate(case.inputs, case.targets)
    assert report.loss == pytest.approx(float(truth), rel=1e-12)
    assert torch.backends.mha.get_fastpath_enabled() == enabled


class Gated(nn.Module):
    """A frozen hard gate whose output is read through an argmax alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.hidden = nn.Linear(1, 2), nn.Linear(1, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.gate.requires_grad_(False)
        self.gate.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        self.gate.bias.copy_(torch.tensor([4.0, -4.0]))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1, keepdim=True)
        hidden = self.hidden(x)
        return torch.where(choice == 0, self.experts[0](hidden), self.experts[1](hidden))


@pytest.mark.filterwarnings("ignore::flops.PrecisionWarning")  # half of the points skip an expert
def test_what_is_only_compared_is_not_taken_for_unread() -> None:
    """NaN passes an argmax unseen, and the first rows all choose expert 0."""
    with torch.no_grad():
        model = Gated().double()
    x, y = torch.arange(10.0).double().unsqueeze(1), torch.zeros(10, 1).double()
    exactly = LikelihoodRatio(1e-6, noise="orthogonal")
    groups = [
        Group(model.hidden, exactly, queries=4),
        Group(model.experts[0], exactly, queries=1),
        Group(model.experts[1], exactly, queries=1),
    ]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-3, atol=1e-3)
