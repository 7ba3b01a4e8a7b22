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
