"""Losses and forward passes that no estimator can work with are refused, and leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from flops import (
    SPSA,
    BatchError,
    CoverageError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    NonFiniteLossError,
    RandomnessError,
)
from tests.conftest import ESTIMATORS, squared
from tests.support.refusing import Noisy, data, mlp, refused, works

# What the loss function returns


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scalar": lambda o, t: squared(o, t).mean(),
    "(B, 1)": lambda o, t: squared(o, t).unsqueeze(1),
    "(B, T)": lambda o, t: (o - t).square(),
    "number": lambda o, t: 0.5,
    "None": lambda o, t: None,
    "list": lambda o, t: squared(o, t).tolist(),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_must_have_one_value_per_point(name: str, grad: bool) -> None:
    fg, (x, y) = ForwardGradient(mlp(), LOSSES[name]), data()
    with refused(fg, BatchError, r'shape \(B,\).*reduction="none"', grad):
        fg.estimate(x, y)
    fg = ForwardGradient(fg.model, squared)
    works(fg, x, y)


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "functional dropout": lambda x: F.dropout(x, 0.5),
    "torch.rand": lambda x: x + torch.rand(()),
    "torch, unused": lambda x: (torch.randn(1), x)[1],
    "numpy": lambda x: x + np.random.rand(),
    "numpy normal": lambda x: x + np.random.randn(),
    "python": lambda x: x + random.random(),
    "python gauss": lambda x: x + random.gauss(0, 1),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_randomness_in_the_forward_pass(name: str, odd: bool, grad: bool) -> None:
    if odd:  # half of a pair of normals is cached: using it up moves no counter
        np.random.seed(0)
        np.random.randn()
        random.gauss(0, 1)
    fg, (x, y) = ForwardGradient(Noisy(SOURCES[name]), squared), data()
    with refused(fg, RandomnessError, r"random state advanced.*model\.eval\(\)", grad):
        fg.estimate(x, y)
    fg.model.source = None
    works(fg, x, y)


def test_randomness_that_starts_after_the_first_step() -> None:
    fg, (x, y) = ForwardGradient(Noisy(lambda x: x), squared), data()
    works(fg, x, y)
    fg.model.source = SOURCES["torch.rand"]
    with refused(fg, RandomnessError, "random"):
        fg.estimate(x, y)
    fg.model.source = None
    works(fg, x, y)


def test_dropout_is_named_and_evaluation_mode_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.3)), nn.Linear(8, 2))
    fg, (x, y) = ForwardGradient(model, squared), data()
    with refused(fg, RandomnessError, r"dropout is on in \['1\.0'\].*model\.eval\(\)"):
        fg.estimate(x, y)
    works(ForwardGradient(model.eval(), squared), x, y)
    model.train()
    model[1][0].p = 0.0
    works(fg, x, y)


# Batch statistics and other things that a forward pass leaves behind


@pytest.mark.parametrize("grad", [False, True])
def test_batch_norm_in_training_mode(grad: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    fg, (x, y) = ForwardGradient(model, squared), data()
    with refused(fg, CoverageError, r"'1' \(BatchNorm1d\) is in training mode.*eval\(\)", grad):
        fg.estimate(x, y)
    model[1].eval()
    works(fg, x, y)


def test_batch_norm_without_statistics_mixes_points_in_any_mode() -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    model, batch = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2)), data()
    fg = ForwardGradient(model.eval(), squared)
    with refused(fg, CoverageError, "no running statistics"):
        fg.estimate(*batch)


class RunningMean(nn.Module):
    """Changes a buffer in training mode, in place or by a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 2), in_place
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.mean.mul_(0.9).add_(x.mean())
        elif self.training:
            self.mean = 0.9 * self.mean + x.mean()
        return self.layer(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward_pass_that_changes_buffers(in_place: bool) -> None:
    model = nn.Sequential(RunningMean(in_place), nn.Tanh())
    group = Group(parameters=model.parameters(), estimator=SPSA(shared=True))
    fg, (x, y) = ForwardGradient(model, squared, group), data()
    buffer = model[0].mean
    with refused(fg, CoverageError, r"changes the buffers \['0\.mean'\].*\.eval\(\)"):
        fg.estimate(x, y)
    assert model[0].mean is buffer
    fg.model.eval()
    works(fg, x, y)


class Counter(nn.Module):
    """Counts its calls in a buffer, whatever its mode."""

    def __init__(self, start: Tensor, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 2), how
        self.register_buffer("calls", start)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            with torch.inference_mode(self.calls.is_inference()):
                self.calls.fill_(True) if self.calls.dtype == torch.bool else self.calls.add_(1)
        elif self.how == "by data":
            self.calls.data += 1
        elif self.how == "by a new one":
            self.calls = self.calls + 1
        elif self.how == "by one of another size":
            self.calls = torch.cat([self.calls.view(-1), self.calls.view(-1)])
        return self.layer(x)


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("start", "how"),
    [
        (torch.zeros(2), "in place"),
        (torch.zeros(2), "by data"),
        (torch.tensor(0), "in place"),
        (torch.tensor(3), "by a new one"),
        (torch.zeros(2, dtype=torch.int32), "by data"),
        (torch.zeros(2, dtype=torch.int32), "by one of another size"),
        (torch.tensor(False), "in place"),
        (torch.zeros(3, 2, dtype=torch.bfloat16).T, "in place"),
        (torch.zeros(2, dtype=torch.complex64), "in place"),
        (inferred(), "in place"),
    ],
)
def test_buffers_of_any_type_and_mode(start: Tensor, how: str, training: bool) -> None:
    model = nn.Sequential(Counter(start.clone() if not start.is_inference() else start, how))
    fg, (x, y) = ForwardGradient(model.train(training), squared), data()
    buffer, before = model[0].calls, start.clone()
    with refused(fg, CoverageError, r"changes the buffers \['0\.calls'\]"):
        fg.estimate(x, y)
    assert model[0].calls is buffer
    assert torch.equal(model[0].calls, before)
    model[0].how = "not at all"
    works(fg, x, y)


def test_a_constant_buffer_may_hold_nan() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 2)), data()
    model.register_buffer("constant", torch.tensor([torch.nan, 1.0]))
    works(ForwardGradient(model, squared), x, y)


def test_spectral_norm_in_training_mode() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(4, 2)), nn.Tanh())
    nn.init.normal_(model[0].parametrizations.weight.original)  # the power iteration goes on
    group = Group(model, LikelihoodRatio(sigma=0.05))
    fg, (x, y) = ForwardGradient(model, squared, group), data()
    with refused(fg, CoverageError, "changes the buffers"):
        fg.estimate(x, y)
    fg.model.eval()
    works(fg, x, y)


# Losses that are not finite


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_clean_loss_that_is_not_finite(value: float, place: int, grad: bool) -> None:
    fg, (x, y) = ForwardGradient(mlp(), squared), data()
    bad = y.clone()
    bad[place, 0] = value
    with refused(fg, NonFiniteLossError, rf"not finite in the clean pass: rows \[{place}", grad):
        fg.estimate(x, bad)
    assert not fg._layouts._known or place == 4  # what NaN hides must not be kept for later batches
    works(fg, x, y)


# Queries of JVP have the losses of the clean pass.
@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("exact", "jvp")])
def test_a_query_loss_that_is_not_finite_names_group_and_points(name: str) -> None:
    model, (x, y) = mlp(), data()
    clean = squared(model(x), y)[3]

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = squared(outputs, targets)
        moved = (targets[:, 0] == y[3, 0]) & ((losses - clean).abs() > 1e-6)
        return torch.where(moved, torch.nan, losses)

    fg = ForwardGradient(model, loss_fn, Group(model, ESTIMATORS[name], queries=4, name="mine"))
    with refused(fg, NonFiniteLossError, r"query of group 'mine': rows \[.*\(points \[3", True):
        fg.estimate(x, y)
    fg.loss_fn = squared
    works(fg, x, y)


# Losses that depend on other points


@pytest.mark.parametrize("grad", [False, True])
def test_a_contrastive_loss(grad: bool) -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")

    fg, (x, y) = ForwardGradient(mlp(), loss_fn), data()
    with refused(fg, BatchError, "depends on the other points.*[Cc]ontrastive", grad):
        fg.estimate(x, y)
    fg.loss_fn = squared
    works(fg, x, y)


def test_a_first_batch_of_one_point_does_not_hide_a_contrastive_loss() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared(outputs - outputs.mean(0), targets)

    model, (x, y) = mlp(), data()
    fg = ForwardGradient(model, loss_fn, Group(model, SPSA(sigma=0.1)))
    fg.estimate(x[:1], y[:1])
    with refused(fg, BatchError, "depends on the other points"):
        fg.estimate(x, y)
