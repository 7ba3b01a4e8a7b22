"""Allocation in a step: pilots, floors, shared draws, budgets over groups, embeddings, failure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    ES,
    SPSA,
    CoverageError,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    NonFiniteLossError,
    QueryError,
)
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman, Signal
from flops.engine.allocation import total_budgets
from tests.conftest import flat, gradients

SIZE, QUERIES = 8, 10
LEAF = LikelihoodRatio(1e-5, "leaf")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def scaled(outputs: Tensor, scales: Tensor) -> Tensor:
    """Squared outputs times a scale for each point; the traces go by the scales' squares."""
    return scales * (outputs - 1).square().sum(1)


SCALES = torch.tensor([0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 10.0, 10.0]).double()


@pytest.fixture
def model() -> Net:
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SIZE, 3).double()


def engine(model: Net, allocator: Any, estimator: Any = LEAF, **options: Any) -> ForwardGradient:
    options.setdefault("queries", QUERIES)
    group = Group(model, estimator, options.pop("queries"), name="g")
    return ForwardGradient(model, scaled, group, allocator=allocator, **options)


class Spy:
    """An allocator that keeps what it was shown."""

    wants_embeddings = True
    min_queries = 1

    def __init__(self, pilot: int = 0) -> None:
        self.pilot = pilot
        self.seen: list[Signal] = []
        self.learned: list[tuple[Signal, Any]] = []

    def __deepcopy__(self, memo: Any) -> Spy:
        return self

    __copy__ = lambda self: self  # noqa: E731

    def allocate(self, signal: Signal) -> Tensor:
        self.seen.append(signal)
        return Equal().allocate(signal)

    def learn(self, signal: Signal, traces: Any) -> None:
        self.learned.append((signal, traces))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


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


# Several groups


def two(model: Net, allocator: Any, queries: tuple[float, float] = (10, 10)) -> ForwardGradient:
    groups = [
        Group([model.first, model.second], LEAF, queries[0], name="early"),
        Group(model.head, LEAF, queries[1], name="late"),
    ]
    return ForwardGradient(model, scaled, groups, allocator=allocator)


def test_across_groups_moves_queries_and_keeps_the_cost(model: Net, x: Tensor) -> None:
    fg = two(model, Neyman(across_groups=True))
    first = fg.estimate(x, SCALES)
    assert all(int(c.sum()) == QUERIES * SIZE for c in first.counts.values())
    for _ in range(10):
        report = fg.estimate(x, SCALES)
    costs = [r.forward_equivalents.queries for r in (first, report)]
    assert costs[1] == pytest.approx(costs[0], rel=0.05)
    # The early group has more outputs, so more noise, and the late one's queries are cheaper: by
    # the ratio of demand / sqrt(cost).
    demand = {n: float(fg.memory[n]["demand"]) for n in fg.memory}
    price = {n: float(fg.memory[n]["query_cost"]) for n in fg.memory}
    counts = {n: int(c.sum()) for n, c in report.counts.items()}
    expected = (demand["early"] / demand["late"]) * (price["late"] / price["early"]) ** 0.5
    assert counts["early"] / counts["late"] == pytest.approx(expected, rel=0.1)
    assert price["late"] < price["early"]


def test_across_groups_gives_more_to_the_noisier_group(x: Tensor) -> None:
    """Two alike towers; the outputs of one are wide, so its estimate is far noisier."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + torch.tanh(self.right(x)).view(-1, 20, 2).mean(1)

    model = Towers().double()
    groups = [Group(m, LEAF, 10, name=n) for n, m in model.named_children()]
    fg = ForwardGradient(model, scaled, groups, allocator=Neyman(across_groups=True), reuse=False)
    for _ in range(8):
        report = fg.estimate(x, SCALES)
    left, right = (int(report.counts[n].sum()) for n in ("left", "right"))
    assert right > 1.5 * left
    assert left + right == pytest.approx(2 * 10 * SIZE, abs=2)


@pytest.mark.parametrize(
    ("pilot", "queries"), [(0, (1, 1)), (0, (1, 30)), (2, (3, 20)), (2, (3, 3))]
)
def test_across_groups_works_at_the_lowest_budgets(
    pilot: int, queries: tuple[float, float], model: Net, x: Tensor
) -> None:
    fg = two(model, Neyman(across_groups=True, pilot=pilot), queries)
    configured = fg.estimate(x, SCALES).forward_equivalents.queries
    for _ in range(6):
        report = fg.estimate(x, SCALES)
        assert report.forward_equivalents.queries <= configured * 1.01
        assert all(int(c.min()) >= pilot + 1 for c in report.counts.values())


def test_budgets_stay_without_across_groups(model: Net, x: Tensor) -> None:
    fg = two(model, Neyman(), (10, 6))
    for _ in range(4):
        report = fg.estimate(x, SCALES)
    assert [int(c.sum()) for c in report.counts.values()] == [80, 48]
    assert total_budgets(fg.groups, fg.allocators, fg.memory, SIZE) == {"early": 80, "late": 48}


# Embeddings


def shown(model: nn.Module, x: Tensor, loss_fn: Any, y: Tensor, **options: Any) -> Tensor | None:
    spy = Spy()
    fg = ForwardGradient(model, loss_fn, Group(model, LEAF, 2), allocator=spy, **options)
    fg.estimate(x, y)
    return spy.seen[0].embeddings


def test_the_embedding_is_the_input_of_the_head(model: Net, x: Tensor) -> None:
    with torch.no_grad():
        hidden = torch.tanh(model.first(x))
        expected = torch.tanh(model.second(hidden)).float()
        torch.testing.assert_close(shown(model, x, scaled, SCALES), expected)
        for wanted in ("second", model.second):
            found = shown(model, x, scaled, SCALES, embedding=wanted)
            torch.testing.assert_close(found, model.second(hidden).float())


def test_an_unknown_embedding_is_a_clear_error(model: Net, x: Tensor) -> None:
    with pytest.raises(CoverageError, match="'nowhere' is not a module"):
        engine(model, Gaussian(), embedding="nowhere").estimate(x, SCALES)
    with pytest.raises(CoverageError, match="not a module"):
        engine(model, Gaussian(), embedding=nn.Linear(2, 2)).estimate(x, SCALES)
    model.idle = nn.Identity()
    with pytest.raises(CoverageError, match="'idle' never runs"):
        engine(model, Gaussian(), embedding="idle").estimate(x, SCALES)


def test_embeddings_of_sequences_and_images() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.flatten(1).sum(1) - targets).square()

    y = torch.randn(SIZE).double()
    tokens = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(SIZE, 5, 3).double()
    with torch.no_grad():
        expected = tokens[:2](x).mean(1).float()
    torch.testing.assert_close(shown(tokens, x, loss, y), expected)
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh()).double()
    x = torch.randn(SIZE, 1, 5, 4).double()
    assert shown(images, x, loss, y) is None  # no head
    with torch.no_grad():
        expected = images[0](x).flatten(1).float()
    torch.testing.assert_close(shown(images, x, loss, y, embedding="0"), expected)
    fg = ForwardGradient(images, loss, Group(images, LEAF, 4), allocator=Gaussian())
    fg.estimate(x, y)


def test_embeddings_are_those_of_the_batch(model: Net, x: Tensor) -> None:
    """Also when the layout was found with another batch, of another size."""
    spy = Spy()
    fg = engine(model, spy)
    fg.estimate(x, SCALES)
    fg.estimate(x[2:5], SCALES[2:5])
    torch.testing.assert_close(spy.seen[1].embeddings, spy.seen[0].embeddings[2:5])


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
