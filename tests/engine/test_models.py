"""Real architectures: exact against autograd where noise spans a site, else against slow loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.engine.auto_groups import automatic_groups
from flops.passes.selection import leaves
from tests.conftest import cosine, gradients, squared
from tests.support.brute import (
    brute_lr,
    brute_pointwise,
    brute_shared,
    outputs_of,
    own_units,
    point_runner,
)
from tests.support.covering import in_turn
from tests.support.zoo import CASES, Case

# CLIP's scale is a parameter that the loss of a pair does not read, and the library says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*loss does not depend on this group")


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """Every parameter's gradient, relative to the largest entry of the whole gradient."""
    assert set(found) == set(truth)
    scale = max(float(t.abs().max()) for t in truth.values())
    assert scale > 1e-3
    for name, gradient in truth.items():
        error = float((found[name] - gradient).abs().max())
        assert error < tolerance * scale, name


def estimate(case: Case, groups: list[Group] | None, **options: Any) -> dict[str, Tensor]:
    """Gradients of one step; the parameters stay as they were, bit by bit."""
    before = copy.deepcopy(case.model.state_dict())
    case.model.zero_grad()
    ForwardGradient(case.model, case.loss_fn, groups, **options).estimate(case.inputs, case.targets)
    for name, value in case.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    return gradients(case.model)


def site_size(case: Case, module: nn.Module) -> int:
    """Noise dimensions of a target's outputs, over all its calls."""
    run = point_runner(case.model, case.loss_fn, case.inputs, case.targets, case.size)
    return sum(out.numel() for out in outputs_of(run, 0, [module]))


def loose(case: Case, covered: list[nn.Module]) -> list[Group]:
    """Parameters outside the targets (a bare scale), by as good an estimate as can be had."""
    inside = {p for m in covered for p in m.parameters()}
    rest = [p for p in case.model.parameters() if p.requires_grad and p not in inside]
    if not rest:
        return []
    estimator = SPSA(sigma=1e-5, shared=True, noise="rademacher")
    return [Group(parameters=rest, estimator=estimator, queries=2, name="loose")]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", ["block", "leaf"])
def test_noise_that_spans_each_target_gives_the_gradient(name: str, split: str) -> None:
    case = CASES[name]()
    modules = [case.model.get_submodule(block) for block in case.blocks]
    if split == "leaf":
        modules = [leaf for m in modules for leaf in leaves("", m).values()]
    estimator = LikelihoodRatio(sigma=1e-6, noise="orthogonal")
    groups = [
        Group(module, estimator, site_size(case, module), name=str(i))
        for i, module in enumerate(modules)
    ]
    found = estimate(case, [*groups, *loose(case, modules)])
    compare(found, case.exact(), 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_stage_gives_the_gradient(name: str) -> None:
    case = CASES[name]()
    modules = [case.model.get_submodule(block) for block in case.blocks]
    stages = {"vit": (0, 3), "llama": (0, 3), "encoder": (0, 3), "cnn": (0, 4), "lstm": (0, 2)}
    begin, end = stages.get(name, (0, 1))
    estimator = LikelihoodRatio(sigma=1e-6, noise="orthogonal", targets="stage")
    queries = site_size(case, modules[end - 1])
    groups = [Group(modules[begin:end], estimator, queries, name="stage")]
    for i, module in enumerate(modules[end:]):
        groups.append(Group(module, estimator, site_size(case, module), name=str(i)))
    found = estimate(case, [*groups, *loose(case, modules)])
    compare(found, case.exact(), 1e-4)


ESTIMATORS = {
    "block": LikelihoodRatio(),
    "leaf": LikelihoodRatio(targets="leaf", baseline="antithetic"),
    "es": ES(),
    "spsa": SPSA(),
    "es shared": ES(shared=True),
    "spsa shared": SPSA(shared=True, noise="rademacher"),
}


@pytest.mark.parametrize(("name", "kind"), in_turn(CASES, ESTIMATORS, step=3))
def test_one_group_equals_a_slow_loop(name: str, kind: str) -> None:
    case, estimator, queries = CASES[name](), ESTIMATORS[kind], 4
    modules = [case.model.get_submodule(block) for block in case.blocks]
    groups = [Group(modules, estimator, queries, name="all"), *loose(case, modules)]
    fg = ForwardGradient(case.model, case.loss_fn, groups, chunk=5)
    fg.estimate(case.inputs, case.targets)
    found = gradients(case.model)
    case.model.zero_grad()
    run = point_runner(case.model, case.loss_fn, case.inputs, case.targets, case.size)
    if kind == "leaf":
        modules = [leaf for m in modules for leaf in leaves("", m).values()]
    if isinstance(estimator, LikelihoodRatio):
        truth = brute_lr(run, modules, estimator, case.size, queries)
    elif estimator.shared:
        units = own_units(case.model, modules)
        truth = brute_shared(run, modules, units, estimator, case.size, queries)
    else:
        truth = brute_pointwise(fg, run, case.size, queries)
    names = {p: n for n, p in case.model.named_parameters()}
    inside = {names[p] for m in modules for p in m.parameters() if p.requires_grad}
    compare({n: found[n] for n in inside}, {names[p]: g for p, g in truth.items()}, 1e-7)


@pytest.mark.parametrize("name", CASES)
def test_automatic_groups_point_to_the_gradient(name: str) -> None:
    case = CASES[name]()
    truth = case.exact()
    groups = automatic_groups(dict(case.model.named_modules()), LikelihoodRatio())
    fg = ForwardGradient(case.model, case.loss_fn, groups)
    for _ in range(20):
        fg.estimate(case.inputs, case.targets)
    found = gradients(case.model)
    assert set(found) == set(truth)
    product = sum(float((found[n] * truth[n]).sum()) for n in truth) / 20
    size = sum(float(t.square().sum()) for t in truth.values())
    assert product / size == pytest.approx(1, abs=0.25)


FEW = ("vit", "llama tied", "cnn", "lstm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in CASES]
)
def test_defaults_point_to_the_gradient(name: str) -> None:
    case = CASES[name]()
    truth = case.exact()
    fg = ForwardGradient(case.model, case.loss_fn)
    for _ in range(20):
        fg.estimate(case.inputs, case.targets)
    found = gradients(case.model)
    assert set(found) == set(truth)
    both = (torch.cat([g[n].flatten() for n in sorted(truth)]) for g in (found, truth))
    assert cosine(*both) > 0.8


class Digits(nn.Module):
    """A step that autograd cannot see through."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))


def test_a_black_box_between_targets_trains() -> None:
    ends = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    model, twin = (nn.Sequential(ends[0], middle, ends[1]) for middle in (Digits(), nn.Tanh()))
    x = torch.randn(8, 3).double()
    y = torch.tanh(x @ torch.randn(3, 2).double())
    estimator = LikelihoodRatio(sigma=1e-6, noise="orthogonal")
    groups = [Group(ends[0], estimator, 4), Group(ends[1], estimator, 2)]
    ForwardGradient(model, squared, groups).estimate(x, y)
    found = gradients(model)
    model.zero_grad()
    squared(twin(x), y).mean().backward()
    compare(found, gradients(twin), 1e-4)
    fg = ForwardGradient(model, squared, [Group(list(ends), LikelihoodRatio(), 4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(fg.estimate(x, y).loss)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
