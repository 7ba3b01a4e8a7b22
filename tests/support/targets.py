"""A model and a group against the brute-force twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flops import ES, SPSA, ForwardGradient, Group, LikelihoodRatio
from tests.conftest import gradients
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
        truth = brute_shared(run, targets, own_units(model, targets), estimator, size, queries)
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


def randomised(model: nn.Module) -> nn.Module:
    """Norms start at one and zero: give every parameter values of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model
