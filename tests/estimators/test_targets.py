"""Targets of all kinds: bare parameters, modules that run twice, odd outputs and batch axes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from flops import SPSA, CoverageError, Exact, ForwardGradient, Group, LikelihoodRatio
from tests.conftest import gradients, squared
from tests.support.targets import ESTIMATORS, check, randomised, summed


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
        assert [u.name for u in layout.bindings[0].modules] == [""]  # run row by row as a whole
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
