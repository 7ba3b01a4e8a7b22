"""The tuner on plain functions: what it estimates, what it asks, and that it can be resumed."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, Exact, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman
from flops.blackbox import Candidates, Objective, Tuner
from flops.blackbox.cma import CMAES
from flops.blackbox.objective import ObjectiveError
from flops.errors import FlopsError, PrecisionWarning, QueryError
from tests.statistical.helpers import assert_mean
from tests.support.recorded import Recorded

D, N = 6, 5
A = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
START = torch.linspace(-1, 1, D)


def linear(parameters: Tensor, points: Tensor) -> Tensor:
    return (parameters.double() * A[points].double()).sum(1) + points


def quadratic(parameters: Tensor, points: Tensor) -> Tensor:
    """Its minimum is another one at every point."""
    scale = torch.arange(1, D + 1)
    return 0.5 * (scale * (parameters.double() - A[points]).square()).sum(1)


def gradient(objective: Objective, theta: Tensor = START, points: Tensor | None = None) -> Tensor:
    """Of the mean loss, by autograd."""
    at = theta.double().requires_grad_()
    points = torch.arange(N) if points is None else points
    objective(at.expand(len(points), -1), points).mean().backward()
    assert at.grad is not None
    return at.grad


def first(objective: Objective, estimator, queries: float, seed: int = 0, **options) -> Tensor:
    """Gradient of the first step."""
    tuner = Tuner(
        START,
        N,
        objective,
        estimator=estimator,
        queries=queries,
        optimizer=Recorded,
        seed=seed,
        **options,
    )
    tuner.step()
    assert isinstance(tuner.optimizer, Recorded)
    return tuner.optimizer.seen[0]


def test_as_many_orthogonal_directions_as_parameters_give_the_gradient_exactly() -> None:
    found = first(linear, LikelihoodRatio(0.5, noise="orthogonal"), D)
    torch.testing.assert_close(found.double(), gradient(linear), rtol=0, atol=2e-6)
    fewer = first(linear, LikelihoodRatio(0.5, noise="orthogonal"), D - 1)
    assert float((fewer - gradient(linear)).norm()) > 1e-2
    pairs = LikelihoodRatio(0.5, noise="orthogonal", baseline="antithetic")
    found = first(quadratic, pairs, 2 * D)
    torch.testing.assert_close(found.double(), gradient(quadratic), rtol=0, atol=2e-5)
    one_sided = first(quadratic, LikelihoodRatio(0.5, noise="orthogonal"), D)
    assert float((one_sided - gradient(quadratic)).norm()) > 1e-2


@pytest.mark.parametrize(
    ("estimator", "queries"),
    [
        (LikelihoodRatio(0.3), 40),
        (LikelihoodRatio(0.3, baseline="none"), 4000),
        (LikelihoodRatio(0.3, baseline="antithetic"), 40),
        (LikelihoodRatio(0.3, noise="rademacher"), 40),
        (LikelihoodRatio(0.3, noise="orthogonal"), 3),
        (ES(0.3), 40),
        (ES(0.3, shared=True), 40),
        (SPSA(0.3), 40),
        (SPSA(0.3, shared=True), 40),
        (SPSA(0.3, shared=True, noise="rademacher"), 40),
        (LikelihoodRatio(0.3, shaping=Shaping(unbiased=True)), 60),
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", [linear, quadratic])
def test_the_mean_of_the_first_step_is_the_gradient(estimator, queries, objective) -> None:
    # Of a quadratic the smoothed gradient is the gradient.
    draws = [first(objective, estimator, queries, seed) for seed in range(32)]
    truth = gradient(objective).float()
    found = torch.stack(draws)
    error = found.std(0) / 32**0.5
    assert float(error.max()) < 0.2 * float(truth.norm()), "too noisy to tell"
    assert ((found.mean(0) - truth).abs() < 5 * error + 1e-5).all()


def test_the_mean_is_that_of_the_smoothed_loss_where_there_is_no_gradient() -> None:
    # E[step(t + sigma z)] = Phi(t / sigma), whose derivative is the normal density.
    def step(parameters: Tensor, points: Tensor) -> Tensor:
        return (parameters[:, 0] > 0).float()

    def one(seed: int) -> Tensor:
        tuner = Tuner(
            torch.tensor([0.2, 3.0]),
            1,
            step,
            estimator=LikelihoodRatio(0.5),
            queries=500,
            optimizer=Recorded,
            seed=seed,
        )
        tuner.step()
        return tuner.optimizer.seen[0]

    assert_mean(torch.stack([one(s) for s in range(64)]), torch.tensor([0.7365, 0.0]))


class Vector(nn.Module):
    """The objective as a model whose parameter is an output, for the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Linear(1, D, bias=False)
        self.theta.weight.data = START.unsqueeze(1).clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.theta(x)


def test_likelihood_ratio_is_that_of_the_engine_on_an_identity_target() -> None:
    model = Vector()

    def losses(outputs: Tensor, points: Tensor) -> Tensor:
        return quadratic(outputs, points).float()

    for noise in ("gaussian", "orthogonal"):
        estimator = LikelihoodRatio(0.3, noise=noise)
        group = Group(model.theta, estimator, queries=D)
        engine = ForwardGradient(model, losses, [group], seed=3)
        model.zero_grad()
        engine.estimate(torch.ones(N, 1), torch.arange(N))
        tuner = Tuner(START, N, quadratic, estimator=estimator, queries=D, optimizer=Recorded)
        tuner.seed = 3
        tuner._batch = lambda step: torch.arange(N)  # the engine's order
        tuner.step()
        assert model.theta.weight.grad is not None
        expected = model.theta.weight.grad.flatten()
        torch.testing.assert_close(tuner.optimizer.seen[0], expected, rtol=1e-4, atol=1e-4)


ALLOCATORS = {
    "equal": Equal(),
    "fixed": Fixed([2, 4, 6, 8, 10]),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(kernel=False),
    "kernel": Gaussian(),
    "neyman": Neyman(),
    "pilot": Neyman(pilot=2),
}
KINDS = {
    "lr": LikelihoodRatio(0.1),
    "es": ES(0.1),
    "spsa": SPSA(0.1),
    "shaped-lr": LikelihoodRatio(0.1, shaping=Shaping()),
    "shaped-spsa": SPSA(0.1, shaping=Shaping()),
}


def make(objective: Objective | None = quadratic, kind="lr", allocator="equal", **options) -> Tuner:
    settings = {"queries": 6.0, "learning_rate": 0.05, "embeddings": A} | options
    return Tuner(
        START,
        N,
        objective,
        estimator=KINDS[kind] if isinstance(kind, str) else kind,
        allocator=ALLOCATORS[allocator],
        **settings,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("kind", KINDS)
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
    tuner = make()
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

    tuner, steady = make(flaky), make()
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


@pytest.mark.parametrize("allocator", ["equal", "bernoulli", "gaussian", "kernel", "pilot"])
@pytest.mark.parametrize("kind", ["lr", "spsa", "shaped-lr"])
@pytest.mark.bits
def test_a_resumed_run_is_the_same_run(kind, allocator) -> None:
    whole = make(kind=kind, allocator=allocator, batch=3)
    list(whole.run(3))
    state = whole.state_dict()
    list(whole.run(4))
    resumed = make(kind=kind, allocator=allocator, batch=3)
    resumed.load_state_dict(state)
    list(resumed.run(4))
    assert torch.equal(whole.parameters, resumed.parameters)
    assert (whole.asked, whole.steps) == (resumed.asked, resumed.steps)
    assert whole.asked == 4 * 21 + 3 * 14


def test_the_state_is_not_shared_with_the_tuner() -> None:
    tuner = make(kind="shaped-lr", allocator="kernel")
    tuner.step()
    state = tuner.state_dict()
    kept = copy.deepcopy(state)
    list(tuner.run(2))
    assert torch.equal(state["theta"], kept["theta"])
    moments = [s["state"][0]["exp_avg"] for s in (state["optimizer"], kept["optimizer"])]
    assert torch.equal(*moments)
    once, again = make(kind="shaped-lr", allocator="kernel"), make(kind="shaped-lr", seed=9)
    again.allocator = copy.deepcopy(ALLOCATORS["kernel"])
    for each in (once, again):  # the seed is part of the state
        each.load_state_dict(state)
        list(each.run(2))
    assert torch.equal(once.parameters, again.parameters)
    assert torch.equal(once.parameters, tuner.parameters)


def test_states_that_do_not_fit_are_refused() -> None:
    tuner = make()
    tuner.ask()
    with pytest.raises(FlopsError, match="in progress"):
        tuner.state_dict()
    tuner.step()
    state = tuner.state_dict()
    other = Tuner(torch.zeros(D + 1), N, None)
    with pytest.raises(FlopsError, match="another number"):
        other.load_state_dict(state)
    with pytest.raises(FlopsError, match="another version"):
        tuner.load_state_dict({**state, "schema": 99})


def test_seeds_differ_and_global_random_state_is_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        tuner = make(kind="shaped-lr", allocator="kernel", seed=seed)
        list(tuner.run(3))
        runs.append(tuner.parameters)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_an_allocator_given_to_two_tuners_is_not_shared() -> None:
    shared, found = Gaussian(), []
    for _ in range(2):
        tuner = Tuner(START, N, quadratic, allocator=shared, queries=6, embeddings=A)
        list(tuner.run(3))
        found.append(tuner.parameters)
    assert torch.equal(*found)
    assert str(shared.state_dict()) == str(Gaussian().state_dict())
    assert str(shared.state_dict()) != str(tuner.allocator.state_dict())


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
            start, 60, errors, estimator=estimator, queries=8, batch=30, learning_rate=0.1
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
        start, 1, one_minus_f1, estimator=LikelihoodRatio(0.3), queries=40, learning_rate=0.1
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
        ({"objective": 7}, "function of"),
        ({"parts": {"text": (2, 2), "image": (1, 1)}}, "do not add up to 6"),
        ({"embeddings": torch.zeros(2, 2)}, "each of the 5 points"),
        ({"queries": 0.5}, "at least 1 queries per point, not 0.5"),
        ({"queries": 1, "estimator": SPSA()}, "at least 2 queries per point"),
        ({"estimator": Exact()}, "LikelihoodRatio, ES and SPSA, not Exact"),
        ({"estimator": SPSA(shared=True), "allocator": Gaussian()}, "correlated"),
    ],
)
def test_arguments_that_do_not_fit_are_explained(arguments, message) -> None:
    given = {"start": START, "points": N, "objective": linear, "queries": 6} | arguments
    with pytest.raises(FlopsError, match=message):
        Tuner(given.pop("start"), given.pop("points"), given.pop("objective"), **given)


def test_what_cannot_be_done_now_is_explained() -> None:
    tuner = make(None)
    with pytest.raises(FlopsError, match="no candidates are pending"):
        tuner.tell(torch.zeros(N))
    with pytest.raises(FlopsError, match=r"use ask\(\) and tell\(\)"):
        tuner.step()
    lost = Tuner(START, N, quadratic, allocator=Fixed([1, 2]), queries=6)
    with pytest.raises(QueryError, match="2 counts were given for 5 points"):
        lost.step()


def test_parts_are_learned_apart_and_the_start_is_not_changed() -> None:
    start = START.clone()
    tuner = Tuner(
        start,
        N,
        quadratic,
        estimator=KINDS["shaped-lr"],
        queries=6,
        parts={"text": (2, 2), "image": (1, 2)},
        learning_rate=0.05,
    )
    report = next(iter(tuner.run(1)))
    list(tuner.run(3))
    assert torch.equal(start, START)
    assert "parameters" in report.shaping


def test_a_question_knows_itself() -> None:
    one = Candidates(START.expand(N, -1), torch.arange(N), "clean")
    same = Candidates(START.clone().expand(N, -1), torch.arange(N), "clean")
    assert one.digest() == same.digest()
    others = [
        Candidates(START.expand(N, -1), torch.arange(N), "query"),
        Candidates(START.expand(N, -1), torch.arange(N).flip(0), "clean"),
        Candidates(torch.nextafter(START, START + 1).expand(N, -1), torch.arange(N), "clean"),
        one.part(0, 2),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 5
    assert torch.equal(one.part(1, 3).points, torch.tensor([1, 2]))


def test_evolution_improves_is_reproducible_and_disturbs_nobody() -> None:
    pytest.importorskip("cma")
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    def run(seed: int) -> CMAES:
        search = CMAES(START, N, quadratic, sigma=0.3, batch=3, population=8, seed=seed)
        assert search.step_cost() == 24
        while search.steps < 60:
            search.tell(search.evaluate(search.ask()))
            np.random.rand()  # somebody else's draws must not matter
        assert search.asked == sum(8 * (3, 2)[step % 2] for step in range(60))
        return search

    kept = np.random.get_state()
    one = run(0)
    np.random.set_state(kept)
    np.random.seed(7)
    two, other = run(0), run(1)
    assert torch.equal(one.parameters, two.parameters)
    assert not torch.equal(one.parameters, other.parameters)
    before = float(quadratic(START.expand(N, -1), torch.arange(N)).mean())
    least = float(quadratic(A.double().mean(0).expand(N, -1), torch.arange(N)).mean())
    after = float(quadratic(one.parameters.expand(N, -1), torch.arange(N)).mean())
    assert after - least < 0.4 * (before - least)
    np.random.seed(1)
    assert random.getstate() == states[0]
    search = CMAES(START, N, quadratic, population=4)
    search.tell(search.evaluate(search.ask()))
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    with pytest.raises(FlopsError, match="sigma must be positive"):
        CMAES(START, N, sigma=0)
