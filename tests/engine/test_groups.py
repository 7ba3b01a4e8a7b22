"""Groups and options that do not fit are refused with what would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    ES,
    SPSA,
    CoverageError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    QueryError,
)
from flops.allocators import Equal
from tests.conftest import ESTIMATORS, squared
from tests.support.refusing import BLOCK, PAIRS, assert_same, data, mlp, refused, snapshot, works

# Targets and groups


def rest(*names: str) -> Group:
    return Group(list(names), LikelihoodRatio(), name="rest")


STRANGER = nn.Linear(4, 5)

GROUPS: dict[str, tuple[str, Callable[[nn.Module], list[Any]]]] = {
    "unknown module": (
        "target Linear is not a module of the model",
        lambda m: [Group(STRANGER, BLOCK)],
    ),
    "module of another model": (
        "not a module of the model",
        lambda m: [Group(copy.deepcopy(m), BLOCK)],
    ),
    "unknown name": (
        r"no module is called '00'; did you mean \['0'",
        lambda m: [Group("00", BLOCK)],
    ),
    "unknown pattern": ("no module is called 'layer.*'", lambda m: [Group("layer.*", BLOCK)]),
    "target of a wrong type": (
        "a module or a module's name, not int",
        lambda m: [Group([3], BLOCK)],
    ),
    "target twice": ("target '0' is given twice", lambda m: [Group(["0", m[0]], BLOCK)]),
    "nested": ("'0' in group .* overlaps ''", lambda m: [Group([m, m[0]], BLOCK)]),
    "overlap of groups": (
        "'2' in group 'b' overlaps '2' in group 'a'",
        lambda m: [Group(["0", "2"], BLOCK, name="a"), Group(["2", "4"], BLOCK, name="b")],
    ),
    "nested groups": (
        "in group 'b' overlaps .* in group 'a'",
        lambda m: [Group(m, BLOCK, name="a"), Group("2", BLOCK, name="b")],
    ),
    "same name": (
        "two groups are called 'a'",
        lambda m: [Group("0", BLOCK, name="a"), Group(["2", "4"], BLOCK, name="a")],
    ),
    "uncovered": (
        r"in no group: \['2.weight', '2.bias'\].*requires_grad_",
        lambda m: [Group(["0", "4"], BLOCK)],
    ),
    "no groups": ("no groups were given", lambda m: []),
    "empty group": ("either targets or parameters", lambda m: [Group([], BLOCK)]),
    "targets and parameters": (
        "either targets or parameters",
        lambda m: [Group("0", BLOCK, parameters=[m[0].weight])],
    ),
    "foreign parameter": (
        "not part of the model",
        lambda m: [Group(parameters=[nn.Parameter(torch.ones(2))], estimator=SPSA())],
    ),
    "no estimator": ("needs an estimator", lambda m: [Group(m)]),
    "estimator class": ("needs an estimator", lambda m: [Group(m, LikelihoodRatio)]),
    "no group at all": ("must be Group", lambda m: [m]),
    "likelihood ratio on parameters": (
        "perturbs the outputs of modules.*SPSA or ES",
        lambda m: [Group(parameters=m.parameters(), estimator=BLOCK)],
    ),
    "parameter also given by itself": (
        "share a parameter",
        lambda m: [Group(m, BLOCK), Group(parameters=[m[0].weight], estimator=SPSA(), name="p")],
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_do_not_fit(name: str) -> None:
    match, make = GROUPS[name]
    model = mlp()
    before = snapshot(model)
    with pytest.raises(CoverageError, match=match):
        ForwardGradient(model, squared, make(model))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("estimator", "queries", "least"),
    [
        (BLOCK, 0, 1),
        (BLOCK, -1, 1),
        (BLOCK, float("nan"), 1),
        (BLOCK, float("inf"), 1),
        (PAIRS, 0, 2),
        (PAIRS, 1, 2),
        (ES(), 0.5, 1),
        (SPSA(), 1, 2),
        (SPSA(shared=True), 1, 2),
        (ES(baseline="antithetic"), 1.9, 2),
    ],
)
def test_fewer_queries_than_the_estimator_needs(estimator: Any, queries: float, least: int) -> None:
    model = mlp()
    with pytest.raises(QueryError, match=rf"at least {least} queries per point, not {queries}"):
        ForwardGradient(model, squared, Group(model, estimator, queries=queries))


@pytest.mark.parametrize(
    ("queries", "size", "estimator", "budget"),
    [(20, 5, BLOCK, 100), (1.15, 100, BLOCK, 115), (2.5, 3, BLOCK, 7), (2.5, 3, PAIRS, 6)],
)
def test_the_budget_is_rounded_down_to_whole_draws(
    queries: float, size: int, estimator: Any, budget: int
) -> None:
    model = mlp()
    fg = ForwardGradient(model, squared, Group(model, estimator, queries))
    assert fg.estimate(*data(size)).queries == budget


def test_frozen_targets() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with pytest.raises(CoverageError, match=r"no parameter of \['0'\] requires a gradient"):
        ForwardGradient(model, squared, [Group("0", BLOCK), rest("2", "4")])
    frozen = Group(parameters=[model[0].weight], estimator=SPSA())
    with pytest.raises(CoverageError, match=r"none of its parameters requires.*0\.weight"):
        ForwardGradient(model, squared, [frozen, rest("2", "4")])
    fg = ForwardGradient(model, squared, rest("0", "2", "4"))  # one live target is enough
    works(fg, *data())
    assert model[0].weight.grad is None


def test_parameters_that_were_frozen_or_replaced_later() -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    works(fg, *batch)
    fg.model[2].weight.requires_grad_(False)
    with refused(fg, CoverageError, r"frozen, unfrozen or replaced.*\['2.weight'\]"):
        fg.estimate(*batch)
    fg.model[2].weight.requires_grad_(True)
    works(fg, *batch)
    fg.model[4].bias = nn.Parameter(torch.zeros(2))
    with refused(fg, CoverageError, r"frozen, unfrozen or replaced.*\['4.bias'\]"):
        fg.estimate(*batch)


class Partial(nn.Module):
    """One of its layers never runs, and its embedding may be used a second time."""

    def __init__(self, tied: bool = False, runs: bool = False) -> None:
        super().__init__()
        self.layer, self.idle, self.tied, self.runs = nn.Linear(4, 2), nn.Linear(4, 2), tied, runs

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.tied:
            out = out + torch.tanh(x @ self.layer.weight.T)
        return out + self.idle(x) if self.runs else out


@pytest.mark.parametrize("name", ["block", "leaf", "stage"])
def test_a_target_that_never_fires(name: str) -> None:
    model, batch = Partial(), data()
    groups = [Group("layer", ESTIMATORS[name]), Group("idle", ESTIMATORS[name])]
    fg = ForwardGradient(model, squared, groups)
    with refused(fg, CoverageError, "target 'idle' of group 'idle' never runs", True):
        fg.estimate(*batch)
    model.runs = True
    works(fg, *batch)


@pytest.mark.parametrize("name", ["block", "es", "spsa-shared"])
def test_a_tied_parameter_with_a_use_in_no_group(name: str) -> None:
    model, batch = Partial(tied=True, runs=True), data()
    groups = [Group("layer", ESTIMATORS[name]), Group("idle", ESTIMATORS[name])]
    fg = ForwardGradient(model, squared, groups)
    with refused(fg, CoverageError, r"'layer\.weight' is also used in the model's own.*no group"):
        fg.estimate(*batch)
    works(ForwardGradient(model, squared, Group(model, BLOCK)), *batch)


def test_more_ways_to_name_targets() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            activation = nn.Tanh()  # shared by the blocks, and nothing to learn
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), activation) for _ in range(3)
            )
            self.head = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Blocks()
    names = ["blocks.0", "blocks.1", "blocks.2", "head"]
    for targets in (
        [model.blocks, model.head],
        [model.blocks[:2], "blocks.2", "head"],
        ["blocks", "head"],
        (m for m in (*model.blocks, model.head)),
        ["blocks.*", "head"],
    ):
        fg = ForwardGradient(model, squared, Group(targets, BLOCK))
        assert list(fg.groups[0].modules) == names
        works(fg, *data())
    fg = ForwardGradient(model, squared, Group([model.blocks, model.head[:1], "head.1"], BLOCK))
    assert list(fg.groups[0].modules) == [*names[:3], "head.0", "head.1"]


# Options


OPTIONS = [
    lambda: LikelihoodRatio(sigma=0),
    lambda: LikelihoodRatio(sigma=-1),
    lambda: LikelihoodRatio(sigma=float("nan")),
    lambda: LikelihoodRatio(targets="layer"),
    lambda: LikelihoodRatio(baseline="mean"),
    lambda: LikelihoodRatio(noise="uniform"),
    lambda: ES(sigma=0),
    lambda: ES(baseline="mean"),
    lambda: ES(noise="orthogonal"),
    lambda: SPSA(sigma=-1),
    lambda: SPSA(noise="uniform"),
]


@pytest.mark.parametrize("make", OPTIONS)
def test_options_of_estimators(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must be positive.* not|is not one of \["):
        make()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chunk": 1}, ValueError, "at least 2 rows, not 1"),
        ({"chunk": 0}, ValueError, "at least 2 rows, not 0"),
        ({"seed": 0.5}, TypeError, "float"),
        ({"allocator": Equal}, TypeError, r"like Equal\(\)"),
        ({"allocator": "equal"}, TypeError, r"like Equal\(\)"),
        ({"loss_fn": None}, TypeError, r"function of \(outputs, targets\)"),
        ({"model": lambda x: x}, TypeError, "must be a torch.nn.Module"),
    ],
)
def test_options_of_the_engine(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ForwardGradient(**{"model": mlp(), "loss_fn": squared, **options})
