"""Allocation in a step: pilots, floors, shared draws, failure, the order of points."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flops import (
    ES,
    SPSA,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    NonFiniteLossError,
    QueryError,
)
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman
from tests.conftest import flat, gradients
from tests.support.scaled import LEAF, QUERIES, SCALES, SIZE, Net, Spy, engine, scaled


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SIZE, 3).double()


# Pilots


@pytest.mark.parametrize(("pilot", "charged"), [(1, 2), (2, 2), (3, 4)])
@pytest.mark.parametrize("allocator", [Gaussian, Neyman])
def test_a_pilot_is_charged_and_counted(
    allocator: Any, pilot: int, charged: int, model: Net, x: Tensor
) -> None:
    for estimator, least in ((LEAF, pilot + 1), (SPSA(1e-5), charged + 2)):
        report = engine(model, allocator(pilot=pilot), estimator).estimate(x, SCALES)
        assert report.queries == QUERIES * SIZE
        assert int(report.counts["g"].sum()) == QUERIES * SIZE
        assert int(report.counts["g"].min()) >= least
        assert report.dropped == {"g": 0}


def test_a_pilot_teaches_before_the_rest_is_allocated(model: Net, x: Tensor) -> None:
    spy = Spy(pilot=3)
    engine(model, spy).estimate(x, SCALES)
    (taught, traces), (asked,) = spy.learned[0], spy.seen
    assert len(spy.learned) == 1
    assert traces.draws.tolist() == [3] * SIZE
    assert asked.budget == taught.budget == (QUERIES - 3) * SIZE


def test_without_a_pilot_a_step_teaches_for_the_next(model: Net, x: Tensor) -> None:
    spy = Spy()
    engine(model, spy).estimate(x, SCALES)
    (taught, traces), (asked,) = spy.learned[0], spy.seen
    assert traces.draws.tolist() == [QUERIES] * SIZE
    assert asked.budget == taught.budget == QUERIES * SIZE


def test_too_large_a_pilot_is_a_clear_error(model: Net, x: Tensor) -> None:
    fg = engine(model, Neyman(pilot=QUERIES))
    with pytest.raises(QueryError, match="a pilot of 10 leaves 0 of 80 queries for 8 points"):
        fg.estimate(x, SCALES)
    assert all(p.grad is None for p in model.parameters())
    report = engine(model, Neyman(pilot=QUERIES - 1)).estimate(x, SCALES)
    assert report.counts["g"].tolist() == [QUERIES] * SIZE
    with pytest.raises(QueryError, match="pilot"):
        engine(model, Neyman(pilot=8, min_queries=3)).estimate(x, SCALES)


def test_a_pilot_has_noise_of_its_own(model: Net, x: Tensor) -> None:
    """Equal counts in both parts must not repeat the same draws."""
    model.zero_grad()
    engine(model, Spy(pilot=5)).estimate(x, SCALES)
    both = flat(gradients(model))
    model.zero_grad()
    engine(model, Equal(), queries=5).estimate(x, SCALES)
    assert not torch.allclose(flat(gradients(model)), both, rtol=1e-3)


# Floors


def test_points_can_be_dropped_only_when_asked_for(model: Net, x: Tensor) -> None:
    dropped = {0: 0, 1: 0}
    for least in dropped:
        allocator = Gaussian(min_queries=least, feature="standardised", kernel=False)
        fg = engine(model, allocator, queries=2)
        for _ in range(40):
            report = fg.estimate(x, SCALES)
            assert report.dropped["g"] == int((report.counts["g"] == 0).sum())
            assert int(report.counts["g"].sum()) == 2 * SIZE
            dropped[least] += report.dropped["g"]
    assert dropped[0] > 0
    assert dropped[1] == 0


@pytest.mark.parametrize("estimator", [LEAF, SPSA(1e-5)])
def test_a_larger_floor(estimator: Any, model: Net, x: Tensor) -> None:
    fg = engine(model, Neyman(min_queries=3), estimator)
    for _ in range(5):
        counts = fg.estimate(x, SCALES).counts["g"]
        assert int(counts.min()) >= (4 if estimator.unit == 2 else 3)
    with pytest.raises(QueryError, match="too few"):
        engine(model, Neyman(min_queries=QUERIES + 1), estimator).estimate(x, SCALES)


# Shared draws


def test_shared_draws_get_equal_counts_beside_others(model: Net, x: Tensor) -> None:
    groups = [
        Group([model.first, model.second], SPSA(1e-5, shared=True), 4, name="shared"),
        Group(model.head, LEAF, QUERIES, name="own"),
    ]
    fg = ForwardGradient(model, scaled, groups, allocator=Neyman())
    for _ in range(4):
        report = fg.estimate(x, SCALES)
    assert report.counts["shared"].tolist() == [4] * SIZE
    assert len(set(report.counts["own"].tolist())) > 1
    assert isinstance(fg.allocators["shared"], Equal)


@pytest.mark.parametrize("allocator", [Neyman(), Gaussian(), Bernoulli()])
def test_shared_draws_alone_refuse_an_allocator(allocator: Any, model: Net) -> None:
    with pytest.raises(QueryError, match=r"share its draws.*shared=False"):
        engine(model, allocator, SPSA(1e-5, shared=True))


def test_exact_groups_need_no_allocator(model: Net, x: Tensor) -> None:
    groups = [
        Group([model.first, model.second], Exact(), 1, name="exact"),
        Group(model.head, LEAF, QUERIES, name="own"),
    ]
    fg = ForwardGradient(model, scaled, groups, allocator=Neyman(pilot=2))
    report = fg.estimate(x, SCALES)
    assert report.queries == QUERIES * SIZE


# Learning


@pytest.mark.parametrize(
    "allocator",
    [
        Gaussian(feature="standardised"),
        Gaussian(feature="standardised", kernel=False, pilot=2),
        Neyman(),
        Neyman(pilot=2),
        Neyman(running=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("estimator", [LEAF, LikelihoodRatio(1e-5), SPSA(1e-5), ES(1e-5)], ids=str)
def test_counts_come_to_follow_the_traces(
    allocator: Any, estimator: Any, model: Net, x: Tensor
) -> None:
    fg = engine(model, allocator, estimator, queries=20)
    for _ in range(15):
        counts = fg.estimate(x, SCALES, index=range(SIZE)).counts["g"].double()
    assert counts[6:].mean() > 2 * counts[:4].mean()


def test_an_exception_leaves_allocators_and_memory(model: Net, x: Tensor) -> None:
    broken = False
    calls = 0

    def loss_fn(outputs: Tensor, scales: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # The last group's queries fail, when the first one's allocator has learned already.
        found = scaled(outputs, scales)
        return found * float("nan") if broken and calls > 4 else found

    groups = [
        Group([model.first, model.second], LikelihoodRatio(1e-5), 10, name="early"),
        Group(model.head, LEAF, 10, name="late"),
    ]
    for allocator in (Neyman(across_groups=True, running=True), Gaussian(), Bernoulli(p=None)):
        broken = False
        fg = ForwardGradient(model, loss_fn, groups, allocator=allocator, chunk=40)
        for _ in range(2):
            fg.estimate(x, SCALES, index=range(SIZE))
        twin = ForwardGradient(model, loss_fn, groups, allocator=allocator, chunk=40)
        twin.load_state_dict(fg.state_dict())
        before = copy.deepcopy(fg.state_dict())
        broken, calls = True, 0
        with pytest.raises(NonFiniteLossError, match="late"):
            fg.estimate(x, SCALES, index=range(SIZE))
        assert_same(fg.state_dict(), before)
        broken = False
        results = [e.estimate(x, SCALES, index=range(SIZE)) for e in (fg, twin)]
        for name in results[0].counts:
            assert torch.equal(results[0].counts[name], results[1].counts[name])


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def test_the_index_is_passed_on(model: Net, x: Tensor) -> None:
    spy = Spy()
    engine(model, spy).estimate(x, SCALES)
    assert spy.seen[0].index is None
    places = torch.tensor([7, 3, 9, 30, 2, 1, 0, 11])
    engine(model, spy).estimate(x, SCALES, index=places)
    order = torch.argsort(places)
    assert spy.seen[1].index.tolist() == places[order].tolist()
    losses = scaled(model(x), SCALES).detach()
    torch.testing.assert_close(spy.seen[1].losses, losses[order])
    assert torch.equal(spy.learned[1][0].index, spy.seen[1].index)
    with pytest.raises(QueryError, match="index="):
        engine(model, Neyman(running=True)).estimate(x, SCALES)


@pytest.mark.parametrize(
    "allocator",
    [Neyman(), Neyman(running=True), Neyman(pilot=3), Gaussian(), Gaussian(pilot=2), Bernoulli()],
    ids=str,
)
@pytest.mark.bits
def test_with_an_index_the_order_of_points_does_not_matter(
    allocator: Any, model: Net, x: Tensor
) -> None:
    """Not even for sampled counts: points are handed over in the order of their indices."""
    order = torch.tensor([3, 7, 0, 5, 1, 2, 6, 4])
    runs = []
    for places in (torch.arange(SIZE), order):
        model.zero_grad()
        fg = engine(model, allocator, queries=10.4)
        for _ in range(4):
            report = fg.estimate(x[places], SCALES[places], index=places)
        counts = torch.empty_like(report.counts["g"]).index_copy_(0, places, report.counts["g"])
        runs.append((counts, flat(gradients(model))))
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0][1], runs[1][1])
    assert len(set(runs[0][0].tolist())) > 1


def test_fixed_counts_go_by_place(model: Net, x: Tensor) -> None:
    counts = list(range(1, SIZE + 1))
    report = engine(model, Fixed(counts)).estimate(x, SCALES, index=range(SIZE, 0, -1))
    assert report.counts["g"].tolist() == counts
