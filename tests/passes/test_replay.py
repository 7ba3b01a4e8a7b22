"""Prefix reuse changes the cost and nothing else; local products stay inside their targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, CoverageError, ForwardGradient, Group, LikelihoodRatio
from flops.passes.checks import slow_attention_path
from tests.conftest import cosine, estimate, exact, flat, gradients, squared
from tests.support.zoo import CASES, classes, vit_model


class UNet(nn.Module):
    """Skip connections from the early group to the late one."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(4, 4), nn.Linear(4, 3)
        self.middle = nn.Linear(3, 3)
        self.up2, self.up1 = nn.Linear(6, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(first))
        up = self.up2(torch.cat([torch.tanh(self.middle(second)), second], 1))
        return self.up1(torch.cat([torch.tanh(up), first], 1))


class Notes(nn.Module):
    """Leaves something in an attribute for a later module to read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.note = torch.tanh(y)
        return x + y


class Reader(nn.Module):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.__dict__["notes"] = notes  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.notes.note)


def stateful() -> nn.Module:
    notes = Notes()
    return nn.Sequential(notes, nn.Linear(4, 4), Reader(notes))


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


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)
    )


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
ESTIMATORS = {
    "block": LikelihoodRatio(),
    "leaf": LikelihoodRatio(targets="leaf"),
    "es": ES(),
    "spsa": SPSA(),
    "spsa shared": SPSA(shared=True),
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


def test_local_products_cost_what_they_run() -> None:
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
