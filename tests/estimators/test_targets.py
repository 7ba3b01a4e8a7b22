"""Kinds of targets: layers, outputs, batch axes, tied weights, repeated calls, like sizes."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from flops import ES, SPSA, CoverageError, Exact, ForwardGradient, Group, LikelihoodRatio
from flops.passes.structure import inspect
from flops.perturb.rowwise import generic, is_rank_one, thin_of
from tests.conftest import gradients, squared
from tests.support.brute import brute_lr, brute_pointwise, brute_shared, own_units, point_runner


def summed(outputs: Tensor, targets: Any) -> Tensor:
    """A loss with curvature that reads every entry differently."""
    flat = outputs.flatten(1)
    return (flat * torch.linspace(-1, 1, flat.size(1)).to(flat)).sin().sum(1)


def check(
    model: nn.Module, x: Any, targets: list[nn.Module], estimator: Any, size: int = 3, **named: Any
) -> None:
    """The library against a slow loop, and for enough queries of LR against autograd."""
    queries = 4
    loss_fn = named.get("loss_fn", summed)
    fg = ForwardGradient(model, loss_fn, [Group(targets, estimator, queries)])
    model.zero_grad()
    fg.estimate(x)
    found = gradients(model)
    run = point_runner(model, loss_fn, x, None, size)
    if isinstance(estimator, LikelihoodRatio):
        truth = brute_lr(run, targets, estimator, size, queries)
    elif estimator.shared:
        truth = brute_shared(run, own_units(model, targets), estimator, size, queries)
    else:
        truth = brute_pointwise(fg, run, size, queries)
    names = {p: n for n, p in model.named_parameters()}
    assert {names[p] for p in truth} == set(found)
    for p, gradient in truth.items():
        torch.testing.assert_close(found[names[p]], gradient, rtol=1e-7, atol=1e-8)
    assert any(float(g.abs().max()) > 1e-3 for g in truth.values())


ESTIMATORS = {
    "lr": LikelihoodRatio(),
    "es": ES(),
    "spsa": SPSA(),
    "spsa shared": SPSA(shared=True),
}


def layer(module: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    return module.double(), torch.randn(*shape).double()


LAYERS = {
    "linear": lambda: layer(nn.Linear(4, 3), 3, 4),
    "linear without bias": lambda: layer(nn.Linear(4, 3, bias=False), 3, 4),
    "linear over tokens": lambda: layer(nn.Linear(4, 3), 3, 2, 5, 4),
    "linear, sizes coincide": lambda: layer(nn.Linear(3, 3), 3, 3, 3),
    "conv1d": lambda: layer(nn.Conv1d(4, 6, 3, groups=2, dilation=2, padding=1), 3, 4, 9),
    "conv1d same": lambda: layer(nn.Conv1d(2, 3, 3, padding="same", dilation=2), 3, 2, 7),
    "conv2d": lambda: layer(nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2)), 3, 2, 6, 5),
    "conv2d depthwise": lambda: layer(nn.Conv2d(3, 6, 3, groups=3, bias=False), 3, 3, 5, 5),
    "conv2d reflect": lambda: layer(
        nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="reflect", groups=2), 3, 2, 5, 6
    ),
    "conv2d circular": lambda: layer(
        nn.Conv2d(2, 3, (3, 2), padding=1, padding_mode="circular", dilation=(1, 2)), 3, 2, 5, 5
    ),
    "conv2d same, replicate": lambda: layer(
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="replicate"), 3, 2, 5, 5
    ),
    "conv2d channels last": lambda: (
        nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last),
        torch.randn(3, 2, 5, 5).double().to(memory_format=torch.channels_last),
    ),
    "gpt-2's conv1d": lambda: layer(Conv1D(3, 4), 3, 2, 4),
    "conv3d": lambda: layer(nn.Conv3d(2, 3, 2, padding="valid"), 3, 2, 3, 3, 3),
    "transposed conv": lambda: layer(nn.ConvTranspose2d(2, 3, 3, stride=2), 3, 2, 3, 3),
    "layer norm": lambda: layer(nn.LayerNorm(4), 3, 5, 4),
    "layer norm of two axes": lambda: layer(nn.LayerNorm((2, 3)), 3, 2, 3),
    "layer norm without bias": lambda: layer(nn.LayerNorm(4, bias=False), 3, 4),
    "group norm": lambda: layer(nn.GroupNorm(2, 4), 3, 4, 3),
    "rms norm": lambda: layer(nn.RMSNorm(4), 3, 2, 4),
    "batch norm in eval": lambda: layer(nn.BatchNorm2d(3).eval(), 3, 3, 2, 2),
    "prelu": lambda: layer(nn.PReLU(4), 3, 4),
    "embedding": lambda: (nn.Embedding(6, 3).double(), torch.randint(0, 6, (3, 4))),
    "embedding with padding": lambda: (
        nn.Embedding(6, 3, padding_idx=1).double(),
        torch.tensor([[1, 2, 3], [1, 1, 4], [5, 5, 0]]),
    ),
    "weight norm": lambda: layer(weight_norm(nn.Linear(4, 3)), 3, 2, 4),
    "gru": lambda: layer(Sequence(nn.GRU(3, 2, batch_first=True)), 3, 4, 3),
    "attention": lambda: layer(SelfAttention(), 3, 5, 4),
}


class Sequence(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def randomised(model: nn.Module) -> nn.Module:
    """Norms start at one and zero: give every parameter values of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, kind: str) -> None:
    module, x = LAYERS[name]()
    model = nn.Sequential(randomised(module))
    check(model, x, [module], ESTIMATORS[kind])


@pytest.mark.parametrize("name", LAYERS)
def test_thin_products_equal_rows_with_perturbed_weights(name: str) -> None:
    """Large noise, four rows, every parameter: exactly what the module itself gives row by row."""
    module, x = LAYERS[name]()
    randomised(module)
    x, rows = x[torch.tensor([0, 1, 2, 0])], 4
    modules = {"": module}
    batch_like = Whole(x)
    with torch.no_grad():
        call = inspect(module, modules, batch_like, {}).calls[0]
    noise: dict[str, Any] = {}
    dense: dict[str, Tensor] = {}
    for path, p in module.named_parameters():
        if is_rank_one(module, p):
            a, b = torch.randn(rows, p.size(0)).double(), torch.randn(rows, p[0].numel()).double()
            noise[path] = (a, b)
            dense[path] = (a.unsqueeze(2) * b.unsqueeze(1)).reshape(rows, *p.shape)
        else:
            noise[path] = torch.randn(rows, p.numel()).double()
            dense[path] = noise[path].reshape(rows, *p.shape)
    with torch.no_grad():
        found = thin_of(module)(module, module.forward, (x,), {}, noise, call)
        for r in range(rows):
            weights = {n: p + dense[n][r] for n, p in module.named_parameters()}
            truth = torch.func.functional_call(module, weights, (x[r : r + 1],))
            torch.testing.assert_close(found[r : r + 1], truth, rtol=1e-10, atol=1e-10)


def test_transformers_layers_have_thin_products_without_its_import() -> None:
    assert thin_of(Conv1D(3, 4)) is not generic
    code = (
        "import sys, flops.perturb.rowwise as t; t.thin_products(); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Whole:
    """As much of a batch as the structure needs."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.size = x, len(x)

    def losses(self, model: nn.Module, rows: Tensor) -> Tensor:
        return model(self.x[rows]).flatten(1).double().sum(1)


class Bare(nn.Module):
    """A parameter of its own beside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.table = nn.Parameter(torch.randn(1, 2, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table) * self.scale


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_bare_parameter_inside_a_block(kind: str) -> None:
    model = nn.Sequential(Bare()).double()
    check(model, torch.randn(3, 2, 4).double(), [model[0]], ESTIMATORS[kind])


class Twice(nn.Module):
    """A module that runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_module_that_runs_twice(kind: str) -> None:
    model = Twice().double()
    check(model, torch.randn(3, 4).double(), [model.linear], ESTIMATORS[kind])


def test_module_that_runs_twice_has_no_place_in_a_stage() -> None:
    model = Twice()
    fg = ForwardGradient(model, summed, [Group(model.linear, LikelihoodRatio(targets="stage"))])
    with pytest.raises(CoverageError, match=r"linear.*more than once"):
        fg.estimate(torch.randn(3, 4))


class Tied(nn.Module):
    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.functional = functional
        if not functional:
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(ids)))
        return F.linear(x, self.embed.weight) if self.functional else self.head(x)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_tied_weights_get_the_sum_over_their_uses(kind: str) -> None:
    model, ids = Tied().double(), torch.randint(0, 6, (3, 2))
    check(model, ids, [model.embed, model.middle, model.head], ESTIMATORS[kind])


def test_a_use_in_no_group_is_an_error() -> None:
    model, ids = Tied(), torch.randint(0, 6, (3, 2))
    groups = [Group([model.embed, model.middle], LikelihoodRatio())]
    with pytest.raises(CoverageError, match=r"embed\.weight.*'head'"):
        ForwardGradient(model, summed, groups).estimate(ids)
    assert all(p.grad is None for p in model.parameters())


def test_a_use_right_behind_the_target_is_not_inside_it() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.linear(x), self.linear.weight)

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        return summed(outputs, targets) + model.linear.weight.sum()

    model, x = Again(), torch.randn(3, 4)
    for group, loss_fn in ((model.linear, summed), (model, loss)):
        fg = ForwardGradient(model, loss_fn, [Group(group, LikelihoodRatio())])
        with pytest.raises(CoverageError, match=r"linear\.weight.*also used"):
            fg.estimate(x)


@pytest.mark.parametrize("shared", [True, False])
def test_parameters_without_modules_are_meant_in_all_their_uses(shared: bool) -> None:
    model, ids = Tied(functional=True).double(), torch.randint(0, 6, (3, 2))
    model.middle.requires_grad_(False)
    queries = 4000
    estimator = SPSA(shared=shared, noise="rademacher")
    groups = [Group(parameters=[model.embed.weight], estimator=estimator, queries=queries)]
    ForwardGradient(model, summed, groups).estimate(ids)
    found = model.embed.weight.grad.clone()
    model.zero_grad()
    summed(model(ids), None).mean().backward()
    truth = model.embed.weight.grad
    assert float((found - truth).norm() / truth.norm()) < 0.15


class Aliased(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + x**2 * self.b


@pytest.mark.parametrize("shared", [True, False])
def test_both_names_of_a_parameter_count(shared: bool) -> None:
    model, x = Aliased().double(), torch.randn(3, 3).double()
    estimator = SPSA(shared=shared, noise="rademacher")
    assert relative_error(model, x, Group(model, estimator, 4000)) < 0.15


def test_a_second_name_in_a_layer_adds_no_noise() -> None:
    model, x = nn.Linear(1, 1, bias=False).double(), torch.randn(3, 1).double()
    model.alias = model.weight
    assert relative_error(model, x, Group(model, SPSA(1e-5), 2)) < 1e-6


def relative_error(model: nn.Module, x: Tensor, group: Group) -> float:
    """Of all gradients, against autograd."""
    ForwardGradient(model, summed, [group]).estimate(x)
    found = gradients(model)
    model.zero_grad()
    summed(model(x), None).mean().backward()
    truth = gradients(model)
    assert found.keys() == truth.keys()
    error = sum(float((found[n] - truth[n]).square().sum()) for n in truth)
    return (error / sum(float(t.square().sum()) for t in truth.values())) ** 0.5


class PaddedTied(nn.Module):
    """The padding of a lookup has no gradient, that of the table's other use has."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.embed, self.other = nn.Embedding(3, 2, padding_idx=2), other
        self.embed.weight = nn.Parameter(torch.tensor([[0.3, -0.2], [0.5, 0.4], [-0.6, 0.1]]))
        if other == "of the root":
            self.table = self.embed.weight
        if other == "head":
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = 2 * torch.tanh(self.embed(ids).sum(1))
        if self.other == "none":
            return h
        if self.other == "head":
            return self.head(h)
        return F.linear(h, self.table if self.other == "of the root" else self.embed.weight)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("other", ["none", "head", "functional", "of the root"])
def test_padding_learns_from_what_is_no_lookup(other: str, whole: bool, shared: bool) -> None:
    model, ids = PaddedTied(other).double(), torch.tensor([[2, 1], [2, 2], [0, 2]])
    estimator = SPSA(1e-4, shared=shared, noise="rademacher")
    group = Group(parameters=[model.embed.weight], estimator=estimator, queries=4000)
    if whole and other != "functional":  # which lies in no module of the table's
        group = Group(model, estimator, 4000)
    before = model.embed.weight.detach().clone()
    fg = ForwardGradient(model, summed, [group])
    fg.estimate(ids)
    found = gradients(model)
    model.zero_grad()
    summed(model(ids), None).mean().backward()
    truth = model.embed.weight.grad
    ((_, gradient),) = found.items()
    assert bool(gradient[2].any()) == bool(truth[2].any()) == (other != "none")
    # Chance leaves 0.09 on average over seeds and at most 0.18 in 40; a use left out, over 0.9.
    assert float((gradient - truth).norm()) < 0.25 * float(truth.norm())
    assert torch.equal(model.embed.weight, before)
    assert "forward" not in model.embed.__dict__


@pytest.mark.parametrize("estimator", [ES(), SPSA()])
def test_noise_of_unread_tokens_is_not_counted(estimator: ES | SPSA) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    ids = torch.tensor([[1, 2, 3], [5, 5, 0], [0, 0, 0], [8, 8, 8]])
    fg = ForwardGradient(model.double(), summed, [Group(model, estimator, 4, name="all")])
    with fg.session(ids) as session:
        counts = torch.tensor([4, 2, 6, 0])
        queries = session.queries("all", (0, 0, 0), {}, counts)
        found = estimator.estimate(session.layout.bindings[0], queries)
    head = 12 * 2 + 2
    assert found.factors.tolist() == [3 * 4 + head, 4 + head, head, 8 * 4 + head]


class RootTied(nn.Module):
    """The root's own parameter is also a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.weight))


@pytest.mark.parametrize("shared", [True, False])
def test_nested_places_of_a_tied_parameter_count_once(shared: bool) -> None:
    model, x = RootTied().double(), torch.randn(3, 3).double()
    groups = [Group(model, SPSA(shared=shared, noise="rademacher"), queries=4000)]
    ForwardGradient(model, summed, groups).estimate(x)
    found = model.weight.grad.clone()
    model.zero_grad()
    summed(model(x), None).mean().backward()
    # Chance leaves 0.15 on average over seeds and at most 0.26 in 40; counting twice, 1.
    assert float((found - model.weight.grad).norm() / model.weight.grad.norm()) < 0.35


class Returning(nn.Module):
    """One block whose output comes as tensor, tuple, dict or ModelOutput."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.head, self.kind = Wrapped(kind), nn.Linear(3, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        hidden = {
            "tensor": lambda: out,
            "tuple": lambda: out[0],
            "dict": lambda: out["y"],
            "model output": lambda: out.last_hidden_state,
        }[self.kind]()
        return self.head(torch.tanh(hidden))


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {
            "tensor": y,
            "tuple": (y, None, 3),
            "dict": OrderedDict(note="text", y=y),
            "model output": BaseModelOutput(last_hidden_state=y),
        }[self.kind]


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("output", ["tensor", "tuple", "dict", "model output"])
def test_kinds_of_outputs(output: str, kind: str) -> None:
    model = Returning(output).double()
    targets = [model.block, model.head]
    check(model, torch.randn(3, 4).double(), targets, ESTIMATORS[kind])


class TimeFirst(nn.Module):
    """Inside, the batch is the second axis."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x.transpose(0, 1).contiguous())
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


TIME_FIRST = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.LayerNorm(4),
    "gpt-2's conv1d": lambda: Conv1D(4, 4),
    "rms norm": lambda: nn.RMSNorm(4),
    "lstm": lambda: nn.LSTM(4, 4),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0),
}


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("name", TIME_FIRST)
@pytest.mark.parametrize("time", [3, 12, 5])  # of points, of rows in a chunk, neither
def test_batch_axis_need_not_be_the_first(name: str, time: int, kind: str) -> None:
    model = randomised(TimeFirst(TIME_FIRST[name]())).double()
    check(model, torch.randn(3, time, 4).double(), [model.block], ESTIMATORS[kind])


class Positions(nn.Module):
    """A table of positions that all points share, looked up with or without an axis of one."""

    def __init__(self, lead: bool, length: int = 3) -> None:
        super().__init__()
        self.embed, self.table = nn.Linear(2, 4), nn.Embedding(length, 4)
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)
        self.lead, self.length = lead, length

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length)
        table = self.norm(self.table(places.unsqueeze(0) if self.lead else places))
        return self.mix(torch.tanh(self.embed(x) + table))


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("lead", [True, False])
@pytest.mark.parametrize("length", [3, 12, 5])
def test_tables_without_batch_axis(lead: bool, length: int, kind: str) -> None:
    model = randomised(Positions(lead, length)).double()
    targets = [model.embed, model.table, model.norm, model.mix]
    x = torch.randn(3, length, 2).double()
    if kind == "es" and not lead:
        estimator = ESTIMATORS[kind]
        fg = ForwardGradient(model, summed, [Group(targets, estimator, 4)])
        fg.estimate(x)
        (layout,) = fg._layouts._known.values()
        assert [u.name for u in layout.bindings[0].units] == [""]  # run row by row as a whole
    check(model, x, targets, ESTIMATORS[kind])


class FirstRowOnly(nn.Module):
    """Takes the first row of a table: rows of its own would mix up the points."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table(torch.arange(3).unsqueeze(0))[0]


def test_table_whose_rows_cannot_be_kept_apart_is_refused() -> None:
    model, x = FirstRowOnly().double(), torch.randn(4, 3, 4).double()
    rest = Group(model.linear, LikelihoodRatio(), name="rest")
    for estimator in (LikelihoodRatio(), SPSA()):
        fg = ForwardGradient(model, summed, [Group(model.table, estimator), rest])
        with pytest.raises(CoverageError, match=r"table.*no batch axis"):
            fg.estimate(x)


class Folded(nn.Module):
    """Windows are folded into the batch for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(len(x) * 2, -1, 4)
        return torch.tanh(self.linear(windows)).reshape(x.shape)


@pytest.mark.parametrize("kind", ["es", "spsa", "spsa shared"])
def test_folded_batch_is_perturbed_in_the_module_around_it(kind: str) -> None:
    model = nn.Sequential(Folded(), nn.Linear(4, 2)).double()
    check(model, torch.randn(3, 6, 4).double(), [model[0], model[1]], ESTIMATORS[kind])


def test_folded_output_is_refused_for_likelihood_ratio() -> None:
    model = nn.Sequential(Folded())
    fg = ForwardGradient(model, summed, [Group(model[0].linear, LikelihoodRatio())])
    with pytest.raises(CoverageError, match=r"'0\.linear' folds the batch"):
        fg.estimate(torch.randn(3, 6, 4))


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_sizes(size: int, kind: str) -> None:
    """Batch, tokens and channels may all have the same size."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3)).double()
    x = torch.randn(size, 3, 3).double()
    check(model, x, [model[0], model[2], model[3]], ESTIMATORS[kind], size=size)


@pytest.mark.parametrize("kind", [*ESTIMATORS, "leaf"])
def test_hooks_of_the_user_act_once(kind: str) -> None:
    """A hook that changes an output is part of the model, also in rows with their own weights."""
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda module, args, out: out * 3 + 1)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] - 2,))
    groups = [Group(model[0], ESTIMATORS.get(kind, LikelihoodRatio(targets="leaf")), 2000)]
    groups.append(Group(model[1], Exact(), name="rest"))
    x = torch.randn(3, 4).double()
    ForwardGradient(model, squared, groups).estimate(x, torch.zeros(3, 3).double())
    found = model[0].weight.grad.clone()
    model.zero_grad()
    squared(model(x), torch.zeros(3, 3)).mean().backward()
    truth = model[0].weight.grad
    assert float((found - truth).norm() / truth.norm()) < 0.2


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_half_precision(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).bfloat16()
    estimator = type(ESTIMATORS[kind])(sigma=0.3)
    x = torch.randn(4, 4).bfloat16()
    ForwardGradient(model, summed, [Group(model, estimator, 500)]).estimate(x)
    found = gradients(model)
    assert all(g.dtype == torch.bfloat16 and bool(g.isfinite().all()) for g in found.values())


def test_a_gradient_that_stops_inside_a_target_is_an_error() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.from_numpy(self.first(x).detach().numpy()))

    model, x = nn.Sequential(Cut()), torch.randn(3, 4)
    with pytest.raises(CoverageError, match=r"0\.first\.weight.*no gradient flows"):
        ForwardGradient(model, summed, [Group(model[0], LikelihoodRatio())]).estimate(x)
    stage = [Group([model[0].first, model[0].second], LikelihoodRatio(targets="stage"))]
    with pytest.raises(CoverageError, match=r"0\.first\.weight.*no gradient flows"):
        ForwardGradient(model, summed, stage).estimate(x)
    leaf = [Group(model, LikelihoodRatio(targets="leaf"))]
    ForwardGradient(model, summed, leaf).estimate(x)
    assert all(p.grad is not None for p in model.parameters())


def test_unused_parameters_are_no_error() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.spare(x)  # runs, but nobody reads it
            return self.linear(x)

    model = nn.Sequential(Spare())
    ForwardGradient(model, summed, [Group(model[0], LikelihoodRatio())]).estimate(torch.randn(3, 4))
    assert model[0].linear.weight.grad is not None
    assert model[0].spare.weight.grad is None
