"""Bad input gives a clear error, and leaves everything as it was.

Every test of a failing step goes through `refused`, which compares parameters, gradients, hooks,
``forward`` attributes, random states and the step number, and then runs a correct step.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from flops import (
    ES,
    SPSA,
    BatchError,
    CoverageError,
    FlopsError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    NonFiniteLossError,
    PrecisionWarning,
    QueryError,
    RandomnessError,
)
from flops.allocators import Equal, Fixed
from tests.conftest import ESTIMATORS, squared

SIZE = 5


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def data(size: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def random_states() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        str(np.random.get_state(legacy=False)),
        random.getstate(),
    )


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a failed step must leave alone."""
    return {
        "values": {n: t.clone() for n, t in model.state_dict().items()},
        "storage": [p.data_ptr() for p in model.parameters()],
        "grad": {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "random": random_states(),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            [m.training for m in model.modules()],
        ),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in ("storage", "attributes", "hooks", "random", "modes"):
        assert before[name] == after[name], name
    for part in ("values", "grad"):
        assert before[part].keys() == after[part].keys()
        for name, value in before[part].items():
            other = after[part][name]
            same = value is other if value is None or other is None else torch.equal(value, other)
            assert same, (part, name)


@contextmanager
def refused(
    fg: ForwardGradient, error: type[BaseException], match: str | None = None, grad: bool = False
) -> Iterator[None]:
    """The enclosed step fails with this error and changes nothing."""
    fg.model.zero_grad()
    if grad:
        for parameter in fg.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    before, state = snapshot(fg.model), str(fg.state_dict())
    with pytest.raises(error, match=match):
        yield
    assert_same(before, snapshot(fg.model))
    assert str(fg.state_dict()) == state


def works(fg: ForwardGradient, *batch: Any, **options: Any) -> None:
    """A correct step fills all gradients."""
    fg.model.zero_grad()
    step = fg.step
    fg.estimate(*batch, **options)
    assert fg.step == step + 1
    assert all(p.grad is not None for p in fg.model.parameters() if p.requires_grad)


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


# Randomness


class Noisy(nn.Module):
    """Calls a source of randomness in its forward."""

    def __init__(self, source: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.source: Callable[[Tensor], Tensor] | None = source

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if self.source is None else self.source(x)


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
    with refused(fg, RandomnessError, r"random state moved.*model\.eval\(\)", grad):
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


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "exact"])
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


# Targets and groups


def rest(*names: str) -> Group:
    return Group(list(names), LikelihoodRatio(), name="rest")


STRANGER = nn.Linear(4, 5)
BLOCK, PAIRS = LikelihoodRatio(), LikelihoodRatio(baseline="antithetic")
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


# Exceptions in the user's code


class Boom(Exception):
    """An error of the user's own."""


class Bomb:
    """Raises at the k-th call from anywhere."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls, self.at = error, 0, -1

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class Armed(nn.Module):
    """A layer that calls the bomb before or after its work."""

    def __init__(self, bomb: Bomb, layer: nn.Module, late: bool) -> None:
        super().__init__()
        self.layer, self.late = layer, late
        self._bomb = [bomb]

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self._bomb[0]()
        out = self.layer(x)
        if self.late:
            self._bomb[0]()
        return out


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_exception_at_any_call_changes_nothing(name: str, error: type[BaseException]) -> None:
    bomb, (x, y) = Bomb(error), data(3)
    layers = [Armed(bomb, layer, i % 2 == 1) for i, layer in enumerate(mlp()) if i != 3]
    model = nn.Sequential(*layers)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        bomb()
        return squared(outputs, targets)

    def engine() -> ForwardGradient:
        bomb.calls, bomb.at = 0, -1
        halves = [Group(model[:2], ESTIMATORS[name], 2, name="a")]
        halves += [Group(model[2:], ESTIMATORS[name], 2, name="b")]
        return ForwardGradient(model, loss_fn, halves, chunk=4)

    def reference() -> list[Tensor]:
        model.zero_grad()
        engine().estimate(x, y)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth = reference()
    total = bomb.calls
    fg = engine()
    fg.estimate(x, y)
    bomb.calls = 0
    fg.estimate(x, y)
    probe = total - bomb.calls  # calls that only a new kind of input needs
    assert total >= 20
    values = copy.deepcopy(model.state_dict())
    for at in range(1, total + 1):
        fg = engine()
        bomb.at = at
        try:
            with refused(fg, error, grad=at % 2 == 0):
                fg.estimate(x, y)
        except pytest.fail.Exception:
            # A trial of what can be reused takes an error for "needs what was left out".
            assert error is Boom
            assert at <= probe
            assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
            continue
        bomb.at = -1
        model.zero_grad()
        fg.estimate(x, y)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


def test_an_exception_after_a_random_draw_restores_the_random_state() -> None:
    def draw_and_raise(x: Tensor) -> Tensor:
        torch.rand(3), np.random.rand(), random.random()
        raise Boom

    fg, batch = ForwardGradient(Noisy(draw_and_raise), squared), data()
    with refused(fg, Boom):
        fg.estimate(*batch)
    fg.model.source = None
    works(fg, *batch)


# Losses that depend on other points


@pytest.mark.parametrize("grad", [False, True])
def test_a_contrastive_loss(grad: bool) -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")

    fg, (x, y) = ForwardGradient(mlp(), loss_fn), data()
    with refused(fg, BatchError, "changes with the other points.*[Cc]ontrastive", grad):
        fg.estimate(x, y)
    fg.loss_fn = squared
    works(fg, x, y)


def test_a_first_batch_of_one_point_does_not_hide_a_contrastive_loss() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared(outputs - outputs.mean(0), targets)

    model, (x, y) = mlp(), data()
    fg = ForwardGradient(model, loss_fn, Group(model, SPSA(sigma=0.1)))
    fg.estimate(x[:1], y[:1])
    with refused(fg, BatchError, "changes with the other points"):
        fg.estimate(x, y)


# Wrappers


def test_a_compiled_copy_is_unwrapped() -> None:
    model = mlp()
    fg = ForwardGradient(torch.compile(model, backend="eager"), squared)
    assert fg.model is model
    works(fg, *data())


def test_data_parallel_is_unwrapped() -> None:
    model = mlp()
    fg = ForwardGradient(nn.DataParallel(model), squared)
    assert fg.model is model
    works(fg, *data())


def test_distributed_data_parallel_is_unwrapped() -> None:
    model = mlp()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        fg = ForwardGradient(nn.parallel.DistributedDataParallel(model), squared)
        assert fg.model is model
        works(fg, *data())
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_compiled_in_place_is_refused() -> None:
    model = mlp()
    model[2].compile(backend="eager")
    with pytest.raises(FlopsError, match=r"module '2' is compiled.*without compiling"):
        ForwardGradient(model, squared)
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(FlopsError, match="module 'model' is compiled"):
        ForwardGradient(model, squared)
    with pytest.raises(FlopsError, match="module '0' is compiled"):
        ForwardGradient(nn.Sequential(torch.compile(nn.Linear(4, 2), backend="eager")), squared)


def test_script_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(mlp())
        traced = torch.jit.trace(mlp(), data()[0])
    for model in (script, traced, nn.Sequential(nn.Linear(4, 4), script)):
        with pytest.raises(FlopsError, match="is a ScriptModule; pass the eager model"):
            ForwardGradient(model, squared)


# The arguments of a step


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([0, 1, 2], "3 entries for 5 points"),
        (torch.arange(6), "6 entries for 5 points"),
        ([0, 1, 2, 3, 0], "names a point twice"),
        ([0.0, 1.0, 2.0, 3.0, 4.0], "one integer per point, not torch.float32"),
        (torch.ones(5, dtype=torch.bool), "one integer per point, not torch.bool"),
        (torch.arange(5).view(5, 1), r"one integer per point, not .* \(5, 1\)"),
        (torch.tensor(3), "one integer per point"),
    ],
)
def test_index(index: Any, match: str) -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, BatchError, match, True):
        fg.estimate(*batch, index=index)
    for good in ([4, 9, 2, 0, 10**12], torch.arange(5), np.arange(5), range(5)):
        works(fg, *batch, index=good)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, y: ([x], y), "inputs must be a tensor"),
        (lambda x, y: (x[:0], y[:0]), "batch is empty"),
        (lambda x, y: (x, y[:3]), "targets have 3 points"),
        (lambda x, y: ((), None), "no tensor with a batch axis"),
    ],
)
def test_inputs(make: Callable[[Tensor, Tensor], Any], match: str) -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, BatchError, match, True):
        fg.estimate(*make(*batch))
    works(fg, *batch)


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    fg, batch = ForwardGradient(mlp(), squared), data()
    with refused(fg, FlopsError, "outside of torch.inference_mode"), torch.inference_mode():
        fg.estimate(*batch)
    with torch.no_grad():
        works(fg, *batch)
    with torch.inference_mode():
        made_there = tuple(t.clone() for t in batch)
    works(fg, *made_there)


# Counts


@pytest.mark.parametrize(
    ("counts", "estimator", "match"),
    [
        ([1, 2, 3], BLOCK, "3 counts were given for 5 points"),
        ([1, 2, 3, 4, 0], BLOCK, "at least 1"),
        ([2, 2, 2, 2, 3], PAIRS, "multiples of 2"),
        ([2, 2, 2, 2, 0], PAIRS, "at least 2"),
        ([1, 2, 1, 2, 1], ES(shared=True), "shared by the batch.*same number"),
        ([2, 4, 2, 2, 2], SPSA(shared=True), "shared by the batch.*same number"),
    ],
)
def test_counts_given_by_hand(counts: list[int], estimator: Any, match: str) -> None:
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, estimator), allocator=Fixed(counts))
    with refused(fg, QueryError, match, True):
        fg.estimate(*batch)


@pytest.mark.parametrize("counts", [[1.5, 2], [[1, 2]], ["a"], 3])
def test_counts_that_are_no_integers(counts: Any) -> None:
    with pytest.raises(QueryError, match="one whole number per point"):
        Fixed(counts)


def test_a_shared_budget_that_does_not_divide() -> None:
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, SPSA(shared=True), queries=3))
    with refused(fg, QueryError, "shared by the batch.*whole number of draws"):
        fg.estimate(*batch)


class Broken(Equal):
    """Returns what it is told."""

    answer: Any = None

    def allocate(self, signal: Any) -> Any:
        return type(self).answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (torch.ones(4, dtype=torch.long), r"LongTensor of shape \(5,\)"),
        (torch.ones(5), r"LongTensor of shape \(5,\)"),
        ([1] * 5, r"LongTensor of shape \(5,\)"),
        (torch.tensor([2, 2, 2, 2, -2]), "none negative"),
        (torch.zeros(5, dtype=torch.long), "not all 0"),
        (torch.tensor([2, 2, 2, 2, 1]), "multiples of 2"),
    ],
)
def test_an_allocator_that_returns_nonsense(answer: Any, match: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Broken, "answer", answer)
    model, batch = mlp(), data()
    fg = ForwardGradient(model, squared, Group(model, PAIRS, name="g"), allocator=Broken())
    with refused(fg, QueryError, f"group 'g'.*{match}"):
        fg.estimate(*batch)


# Precision


def slope(size: float) -> tuple[ForwardGradient, tuple[Tensor, Tensor]]:
    """An engine whose median loss difference is about size * rounding unit of a loss of 100."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    sigma = size * torch.finfo(torch.float32).eps * 100
    group = Group(model, LikelihoodRatio(sigma=sigma, noise="rademacher"), name="g")
    fg = ForwardGradient(model, lambda o, t: o.flatten() + t, group)
    return fg, (torch.randn(SIZE, 4), torch.full((SIZE,), 100.0))


def test_a_warning_when_rounding_dominates() -> None:
    fg, batch = slope(20)
    with pytest.warns(PrecisionWarning, match=r"group 'g'.*under 50 rounding units.*raise sigma"):
        fg.estimate(*batch)
    fg.estimate(*batch)  # once per group is enough: warnings are errors here
    again, batch = slope(20)
    with refused(again, PrecisionWarning, "rounding"):  # as an error it comes before any change
        again.estimate(*batch)


def test_a_warning_when_all_differences_vanish() -> None:
    fg, batch = slope(0.01)
    with pytest.warns(PrecisionWarning, match="under 50 rounding units"):
        fg.estimate(*batch)


@pytest.mark.parametrize("size", [80, 1000])
def test_no_warning_above(size: float) -> None:
    fg, batch = slope(size)
    fg.estimate(*batch)  # warnings are errors


@pytest.mark.parametrize("name", ["block", "antithetic", "es", "es-shared", "spsa", "spsa-shared"])
def test_every_estimator_warns(name: str) -> None:
    model, (x, y) = mlp(), data()
    for sigma, warns in ((1e-7, True), (1e-2, False)):
        estimator = copy.copy(ESTIMATORS[name])
        object.__setattr__(estimator, "sigma", sigma)
        fg = ForwardGradient(model, squared, Group(model, estimator))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fg.estimate(x, y)
        assert [w.category for w in seen] == [PrecisionWarning] * warns
        assert all(w.filename == __file__ for w in seen)
