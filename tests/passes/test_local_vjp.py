"""Local products: no graph spans more than one target, and everything is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.passes.local_vjp import inner
from tests.conftest import squared
from tests.support.replaying import ESTIMATORS, stack


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise AssertionError("a derivative of what lies between the targets was used")


class Tripwire(nn.Module):
    """Nothing forward; an error if anybody differentiates through it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Trip.apply(x)
        # The wire is live: were the input part of a graph, its derivative would be asked for.
        assert not (torch.is_grad_enabled() and x.requires_grad)
        return out


class Block(nn.Module):
    def __init__(self, wired: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.wire = Tripwire() if wired else nn.Identity()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.b(self.wire(torch.tanh(self.a(x)))) * scale


class Wired(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.wire, self.head = Tripwire(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, scale=x.mean(1, keepdim=True))
            if number == 1:
                x = self.wire(x)
        return self.head(self.wire(x))


class Graphs:
    """Collects the parameters that each graph reaches, whenever a gradient is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached: list[set[int]] = []
        original = torch.autograd.grad

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.reached.append(_parameters([out.grad_fn for out in outputs]))
            return original(outputs, inputs, *args, **kwargs)

        monkeypatch.setattr(torch.autograd, "grad", grad)


def _parameters(nodes: list[Any]) -> set[int]:
    found, seen, todo = set(), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo.extend(after for after, _ in node.next_functions)
    return found


@pytest.mark.parametrize("targets", ["block", "leaf", "stage"])
@pytest.mark.parametrize("reuse", [True, False])
def test_no_graph_spans_more_than_one_target(
    targets: Any, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wired(inside=targets == "leaf").double()
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    with pytest.raises(AssertionError):
        squared(model(x), y).mean().backward()
    halves = [model.blocks[:2], model.blocks[2:]]
    estimator = LikelihoodRatio(targets=targets)
    groups = [Group(list(half), estimator, 2, name=str(i)) for i, half in enumerate(halves)]
    groups.append(Group(model.head, estimator, 2, name="head"))
    graphs = Graphs(monkeypatch)
    ForwardGradient(model, squared, groups, reuse=reuse).estimate(x, y)
    own = {
        "block": [*model.blocks, model.head],
        "leaf": [m for m in model.modules() if isinstance(m, nn.Linear)],
        "stage": [*halves, model.head],
    }[targets]
    allowed = [{id(p) for p in module.parameters()} for module in own]
    assert len(graphs.reached) >= len(own)
    assert all(reached in allowed for reached in graphs.reached)
    assert all(p.grad is not None and p.grad.grad_fn is None for p in model.parameters())


@pytest.mark.parametrize("kind", [*ESTIMATORS, "stage"])
def test_hooks_and_forwards_are_as_before(kind: str) -> None:
    estimator = ESTIMATORS.get(kind, LikelihoodRatio(targets="stage"))
    model = stack().double()
    calls: list[str] = []
    hooks = [
        model[0].register_forward_hook(lambda *_: calls.append("after")),
        model[2].register_forward_pre_hook(lambda *_: calls.append("before")),
    ]
    own = model[3].forward
    model[3].forward = lambda x: own(x)  # the user's own
    mine = model[3].forward
    before = [(dict(m.__dict__), dict(m._forward_hooks)) for m in model.modules()]
    weights = [p.detach().clone() for p in model.parameters()]
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    ForwardGradient(model, squared, [Group(["0", "2", "4", "5"], estimator, 4)]).estimate(x, y)
    for module, (attributes, after) in zip(model.modules(), before, strict=True):
        assert set(module.__dict__) == set(attributes)
        assert dict(module._forward_hooks) == after
    assert model[3].forward is mine
    assert "forward" not in model[0].__dict__
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert "after" in calls
    assert "before" in calls
    calls.clear()
    model(x)
    assert calls == ["after", "before"]
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kind", [*ESTIMATORS, "stage"])
def test_all_is_put_back_when_the_loss_raises(kind: str) -> None:
    estimator = ESTIMATORS.get(kind, LikelihoodRatio(targets="stage"))
    model, count = stack().double(), [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        count[0] += 1
        if count[0] > limit:
            raise ArithmeticError("as the user's loss would")
        return squared(outputs, targets)

    weights = [p.detach().clone() for p in model.parameters()]
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    limit = 10**9
    fg = ForwardGradient(model, loss, [Group(["0", "2", "4", "5"], estimator, 4)], chunk=4)
    fg.estimate(x, y)
    model.zero_grad()
    limit, count[0] = 2, 0  # the clean pass and a query or two
    with pytest.raises(ArithmeticError):
        fg.estimate(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.is_grad_enabled()


def test_local_vjps_cost_what_they_run() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    groups = [Group(model[3], LikelihoodRatio(targets="leaf"), queries=2)]
    cost = {}
    for reuse in (True, False):
        report = ForwardGradient(model, squared, groups, reuse=reuse).estimate(x, y)
        cost[reuse] = report.forward_equivalents.local / 5
    assert cost[True] == pytest.approx(3 / 4, rel=0.08)  # one layer of four: forward and product
    assert cost[False] == pytest.approx(1 + 2 / 4, rel=0.08)


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
def test_an_inner_product_is_a_sum_in_double_precision(a: Tensor) -> None:
    assert inner(a, a) == pytest.approx(float(a.double().square().sum()), rel=1e-12)


def test_tensors_may_lie_differently_in_memory() -> None:
    a, b = torch.randn(400, 900), torch.randn(900, 400).T
    assert inner(a, b) == pytest.approx(float((a.double() * b.double()).sum()))
