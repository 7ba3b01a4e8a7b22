"""The tuner on plain functions: what it asks for, what it is told, and what it minimises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flops import SPSA, Exact, LikelihoodRatio
from flops.allocators import Fixed, Gaussian
from flops.blackbox import Tuner
from flops.blackbox.objective import ObjectiveError
from flops.errors import FlopsError, PrecisionWarning, QueryError
from tests.support.covering import in_turn
from tests.support.tuned_functions import ALLOCATORS, KINDS, START, A, D, N, linear, make, quadratic


@pytest.mark.parametrize(("allocator", "kind"), in_turn(ALLOCATORS, KINDS, full=["equal"]))
def test_every_estimator_and_allocator_improves_and_every_row_is_counted(kind, allocator) -> None:
    rows = []

    def counted(parameters: Tensor, points: Tensor) -> Tensor:
        rows.append(len(points))
        assert parameters.shape == (len(points), D)
        assert parameters.dtype == torch.float32
        assert 0 <= int(points.min()) <= int(points.max()) < N
        return quadratic(parameters, points)

    tuner = make(counted, kind, allocator)
    before = float(quadratic(START.expand(N, -1), torch.arange(N)).mean())
    cost = tuner.step_cost()
    assert cost == N + 6 * N
    for report in tuner.run(40):
        assert report.queries == 6 * N
        assert int(report.counts["parameters"].sum()) == 6 * N
        assert int(report.counts["parameters"].min()) >= tuner.group.estimator.unit
    assert tuner.asked == sum(rows) == 40 * cost
    assert tuner.steps == 40
    after = float(quadratic(tuner.parameters.expand(N, -1), torch.arange(N)).mean())
    least = float(quadratic(A.double().mean(0).expand(N, -1), torch.arange(N)).mean())
    assert after - least < 0.4 * (before - least)


def test_fixed_counts_are_kept() -> None:
    tuner = make(allocator="fixed")
    assert sorted(tuner.step().counts["parameters"].tolist()) == [2, 4, 6, 8, 10]


def test_shared_pairs_ask_for_no_clean_loss() -> None:
    tuner = make(kind=SPSA(0.1, shared=True))
    asked = tuner.ask()
    assert (asked.kind, asked.parameters.stride(0)) == ("query", 0)
    tuner.step()
    assert tuner.asked == 6 * N


def test_batches_take_every_point_once_an_epoch() -> None:
    seen: list[list[int]] = []

    def remembered(parameters: Tensor, points: Tensor) -> Tensor:
        seen.append(sorted(set(points.tolist())))
        return quadratic(parameters, points)

    tuner = make(remembered, batch=2)
    assert tuner.steps_per_epoch == 3
    list(tuner.run(6))
    clean = seen[::2]
    for epoch in (clean[:3], clean[3:]):
        assert sorted(point for batch in epoch for point in batch) == list(range(N))
        assert [len(points) for points in epoch] == [2, 2, 1]
    assert clean[:3] != clean[3:]


@pytest.mark.parametrize("allocator", ["equal", "kernel", "pilot"])
@pytest.mark.parametrize("kind", ["lr", "spsa", "shaped-lr"])
def test_ask_and_tell_is_run(kind, allocator) -> None:
    together = make(kind=kind, allocator=allocator)
    list(together.run(5))
    apart = make(None, kind, allocator)
    kinds = []
    while apart.steps < 5:
        candidates = apart.ask()
        kinds.append(candidates.kind)
        assert apart.waiting
        apart.tell(quadratic(candidates.parameters, candidates.points))
    assert kinds[:2] == ["clean", "query"]
    assert torch.equal(together.parameters, apart.parameters)
    assert not torch.equal(apart.parameters, START)
    assert together.asked == apart.asked


def test_a_question_stays_the_same_until_it_is_told() -> None:
    tuner = make(on_failure="raise")
    candidates = tuner.ask()
    assert tuner.ask() is candidates
    mark = candidates.digest()
    for wrong, message in (
        (torch.zeros(N - 1), r"each of the 5 rows .* shape \(4,\)"),
        (torch.zeros(N, 2, 2), "shape"),
        (torch.tensor(0.0), "shape"),
        (torch.zeros(N, 0), "shape"),
        (torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0]), "not finite for 1 of 5"),
        (torch.full((N,), float("inf")), "not finite for 5 of 5 rows.*large finite one"),
    ):
        with pytest.raises(ObjectiveError, match=message):
            tuner.tell(wrong)
        assert tuner.ask().digest() == mark
        assert tuner.asked == 0
    tuner.tell(quadratic(candidates.parameters, candidates.points))
    assert tuner.asked == N
    assert tuner.ask().digest() != mark
    fresh = make()
    for each in (tuner, fresh):
        while each.steps < 2:
            each.tell(quadratic(each.ask().parameters, each.ask().points))
    assert torch.equal(tuner.parameters, fresh.parameters)


def test_an_objective_that_fails_can_be_asked_again() -> None:
    calls = []

    def flaky(parameters: Tensor, points: Tensor) -> Tensor:
        calls.append(len(points))
        if len(calls) % 3 == 2:
            raise ConnectionError("gone")
        return quadratic(parameters, points)

    tuner, steady = make(flaky, on_failure="raise"), make()
    while tuner.steps < 4:
        try:
            tuner.step()
        except ConnectionError:
            assert tuner.waiting
    list(steady.run(4))
    assert torch.equal(tuner.parameters, steady.parameters)
    assert tuner.asked == steady.asked < sum(calls)


def test_other_columns_of_an_answer_change_nothing() -> None:
    def columns(parameters: Tensor, points: Tensor) -> Tensor:
        losses = quadratic(parameters, points)
        return torch.stack([losses, torch.full_like(losses, float("nan"))], 1)

    one, other = make(columns), make()
    list(one.run(3))
    list(other.run(3))
    assert torch.equal(one.parameters, other.parameters)


SIDE = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
LABEL = (SIDE @ torch.tensor([1.0, -2.0, 0.5, 1.0]) > 0).float()


def errors(parameters: Tensor, points: Tensor) -> Tensor:
    """0 or 1: the derivative is 0 wherever there is one."""
    said = ((parameters * SIDE[points]).sum(1) > 0).float()
    return (said != LABEL[points]).float()


def test_the_error_rate_itself_can_be_minimised() -> None:
    start = torch.tensor([-0.5, 0.5, 0.5, -0.5])

    def rate(theta: Tensor) -> float:
        return float(errors(theta.expand(60, -1), torch.arange(60)).mean())

    assert rate(start) > 0.6
    for estimator in (LikelihoodRatio(0.5), SPSA(0.5)):
        tuner = Tuner(
            start, errors, points=60, estimator=estimator, queries=8, batch=30, learning_rate=0.1
        )
        list(tuner.run(50))
        assert rate(tuner.parameters) < 0.15


def test_a_sigma_that_rounding_swallows_is_warned_of() -> None:
    def rounded(parameters: Tensor, points: Tensor) -> Tensor:
        return 100 + linear(parameters, points).float()

    with pytest.warns(PrecisionWarning, match="raise sigma"):
        make(rounded, LikelihoodRatio(1e-6)).step()
    with pytest.warns(PrecisionWarning, match="does not depend"):
        make(lambda parameters, points: torch.ones(len(points))).step()


def test_a_value_of_a_whole_data_set_can_be_minimised() -> None:
    def one_minus_f1(parameters: Tensor, points: Tensor) -> Tensor:
        assert points.tolist() == [0] * len(points)
        said = parameters @ SIDE.T > 0
        hits = (said & (LABEL > 0)).sum(1)
        return 1 - 2 * hits / (said.sum(1) + LABEL.sum())

    start = torch.tensor([-0.5, 0.5, 0.5, -0.5])
    before = float(one_minus_f1(start.unsqueeze(0), torch.zeros(1)))
    tuner = Tuner(
        start, one_minus_f1, estimator=LikelihoodRatio(0.3), queries=40, learning_rate=0.1
    )
    list(tuner.run(50))
    after = float(one_minus_f1(tuner.parameters.unsqueeze(0), torch.zeros(1)))
    assert before > 0.5
    assert after < 0.15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": torch.zeros(2, 3)}, r"vector of floats, not of shape \(2, 3\)"),
        ({"start": torch.zeros(0)}, "vector of floats"),
        ({"start": torch.zeros(3, dtype=torch.long)}, "vector of floats"),
        ({"points": 0}, "at least one point"),
        ({"batch": 0}, "batch of one"),
        ({"objective": 7}, "function of .* not 7; the number of points is the keyword"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"on_failure": "ignore"}, 'OnFailure or "raise", not'),
        ({"part": 0}, "part and concurrency must be at least 1"),
        ({"price": -1.0}, "price must not be negative"),
        ({"parts": {"text": (2, 2), "image": (1, 1)}}, "do not add up to 6"),
        ({"embeddings": torch.zeros(2, 2)}, "each of the 5 points"),
        ({"queries": 0.5}, "at least 1 queries per point, not 0.5"),
        ({"queries": 1, "estimator": SPSA()}, "at least 2 queries per point"),
        ({"estimator": Exact()}, "LikelihoodRatio, ES and SPSA, not Exact"),
        ({"estimator": SPSA(shared=True), "allocator": Gaussian()}, "correlated"),
        ({"estimator": LikelihoodRatio("auto")}, 'sigma="auto" spends queries'),
    ],
)
def test_arguments_that_do_not_fit_are_explained(arguments, message) -> None:
    given = {"start": START, "points": N, "objective": linear, "queries": 6} | arguments
    with pytest.raises(FlopsError, match=message):
        Tuner(given.pop("start"), given.pop("objective"), **given)


def test_what_cannot_be_done_now_is_explained() -> None:
    tuner = make(None)
    with pytest.raises(FlopsError, match="no candidates are pending"):
        tuner.tell(torch.zeros(N))
    with pytest.raises(FlopsError, match=r"use ask\(\) and tell\(\)"):
        tuner.step()
    lost = Tuner(START, quadratic, points=N, allocator=Fixed([1, 2]), queries=6)
    with pytest.raises(QueryError, match="2 counts were given for 5 points"):
        lost.step()


def test_parts_are_learned_apart_and_the_start_is_not_changed() -> None:
    start = START.clone()
    tuner = Tuner(
        start,
        quadratic,
        points=N,
        estimator=KINDS["shaped-lr"],
        queries=6,
        parts={"text": (2, 2), "image": (1, 2)},
        learning_rate=0.05,
    )
    report = next(iter(tuner.run(1)))
    list(tuner.run(3))
    assert torch.equal(start, START)
    assert "parameters" in report.shaping
