"""Jacobian memory: its posterior, its mean, what it gains, and its state."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flops import ES, SPSA, LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.allocators.base import Allocator, Signal
from flops.blackbox import Outputs, Tuner
from flops.blackbox.jacobian_factors import Factors, Measured
from flops.blackbox.jacobian_memory import _gradients
from flops.errors import FlopsError
from tests.statistical.helpers import assert_mean
from tests.support.recorded import Recorded

D, N, K, RANK = 30, 6, 3, 2
_source = torch.Generator().manual_seed(3)
SHARED = torch.randn(RANK, D, generator=_source)
JACOBIANS = torch.randn(N, K, RANK, generator=_source) @ SHARED  # directions that points share
LABELS = torch.arange(N) % K
START = torch.linspace(-0.5, 0.5, D)


def answers(parameters: Tensor, points: Tensor) -> Tensor:
    """Logits that are linear in the parameters, behind the losses."""
    logits = torch.einsum("qkd,qd->qk", JACOBIANS[points].double(), parameters.double())
    losses = F.cross_entropy(logits, LABELS[points], reduction="none")
    return torch.cat([losses.unsqueeze(1), logits], 1)


def loss(outputs: Tensor, points: Tensor) -> Tensor:
    return F.cross_entropy(outputs, LABELS[points], reduction="none")


OUTPUTS = Outputs(lambda columns: columns[:, 1:], loss)


def gradient(theta: Tensor = START) -> Tensor:
    at = theta.double().requires_grad_()
    answers(at.expand(N, -1), torch.arange(N))[:, 0].mean().backward()
    assert at.grad is not None
    return at.grad


def make(seed: int = 0, unbiased: bool = False, rate: float = 0.0, **options) -> Tuner:
    given = {
        "estimator": LikelihoodRatio(1e-4, shaping=Shaping(unbiased=unbiased)),
        "queries": 8,
        "batch": N,
        "optimizer": lambda p: Recorded(p, rate),
        "outputs": OUTPUTS,
        "seed": seed,
    }
    return Tuner(START, answers, points=N, **(given | options))


@pytest.fixture
def seen() -> Measured:
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 7, D, generator=source, dtype=torch.float64)
    derivatives = torch.randn(2, 7, K, generator=source, dtype=torch.float64)
    age = torch.tensor([[0.0] * 4 + [3.0] * 3, [0.0] * 7])
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 5:] = False
    noise[1, 5:] = derivatives[1, 5:] = 0
    return Measured(noise, derivatives, age, real, noise @ noise.transpose(1, 2))


def dense(factors: Factors, seen: Measured, point: int, rows: list[int]) -> Tensor:
    """Posterior mean of a point's Jacobian by conditioning a Gaussian on derivatives."""
    covariance = factors.directions @ factors.directions.T + factors.floor * torch.eye(D)
    covariance = covariance.double() / K
    noise, derivatives = seen.noise[point, rows], seen.derivatives[point, rows]
    errors = torch.diag(seen.errors(factors.drift)[point, rows].double()) / K
    gain = covariance @ noise.T @ torch.linalg.inv(noise @ covariance @ noise.T + errors)
    return (gain @ derivatives).T


def test_the_fit_is_a_gaussian_conditioned_on_the_derivatives(seen) -> None:
    factors = Factors(SHARED.T.double(), 0.1, 0.05)
    fit = factors.fit(seen)
    for point, rows in ((0, list(range(7))), (1, list(range(5)))):
        found = factors.times(fit.alpha[point].T @ seen.noise[point]) / K
        assert torch.allclose(found, dense(factors, seen, point, rows), rtol=1e-8)


def test_held_out_residuals_and_the_estimate_are_those_of_fits_without_one_derivative(seen) -> None:
    factors = Factors(SHARED.T.double(), 0.1, 0.05)
    fit = factors.fit(seen)
    weights = torch.randn(2, 1, K, generator=torch.Generator().manual_seed(1)).double()
    fresh = seen.real & (seen.age == 0)
    delta, left = _gradients(factors, fit, seen, weights, fresh)
    for point, count, everything in ((0, 4, 7), (1, 5, 5)):
        r = weights[point, 0]
        expected, squares = torch.zeros(D).double(), 0.0
        for i in range(count):
            others = [row for row in range(everything) if row != i]
            without = dense(factors, seen, point, others)
            residual = seen.derivatives[point, i] - without @ seen.noise[point, i]
            assert torch.allclose(fit.held_out[point, i], residual, rtol=1e-8)
            expected += (r @ without + (r @ residual) * seen.noise[point, i]) / count
            squares += float(r @ residual) ** 2 / count
        assert torch.allclose(delta[point], expected, rtol=1e-8)
        assert float(left[point]) == pytest.approx(squares)


def errors_of(tuner: Tuner, steps: int) -> list[float]:
    """Squared error of each step's gradient over its squared length."""
    found = []
    for _ in tuner.run(steps):
        exact = gradient(tuner.parameters)
        error = (tuner.optimizer.seen[-1] - exact).square().sum() / exact.square().sum()
        found.append(float(error))
    return found


def test_what_is_remembered_takes_the_noise_away() -> None:
    tuner = make()
    errors = errors_of(tuner, 12)
    plain = Tuner(
        START,
        answers,
        points=N,
        estimator=LikelihoodRatio(1e-4),
        queries=8,
        batch=N,
        optimizer=Recorded,
    )
    for _ in plain.run(12):
        pass
    exact = gradient()
    noise = [float((g - exact).square().sum() / exact.square().sum()) for g in plain.optimizer.seen]
    assert sum(errors[6:]) < 0.02 * sum(noise[6:])
    assert tuner.report is not None
    assert tuner.report.shaping["parameters"].explained_variance > 0.95


def test_it_follows_parameters_that_move() -> None:
    """The derivative of the loss changes in every step, the Jacobian does not."""
    tuner = make(rate=0.05)
    before = float(answers(START.expand(N, -1), torch.arange(N))[:, 0].mean())
    late = []
    for _ in range(30):
        exact = gradient(tuner.parameters)
        report = tuner.step()
        late.append(float((tuner.optimizer.seen[-1] - exact).norm() / gradient().norm()))
    assert max(late[15:]) < 0.1
    assert report.loss < 0.5 * before


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_mean_is_the_gradient_whatever_is_remembered(steps) -> None:
    found = []
    for seed in range(250):
        tuner = make(seed, unbiased=True)
        for _ in tuner.run(steps):
            pass
        found.append(tuner.optimizer.seen[-1].double())
    assert_mean(torch.stack(found), gradient())


@pytest.mark.parametrize("allocator", [None, Gaussian()])
@pytest.mark.parametrize(
    "estimator",
    [
        LikelihoodRatio(1e-3, shaping=Shaping()),
        LikelihoodRatio(1e-3, shaping=Shaping(), baseline="antithetic"),
        ES(1e-3, shaping=Shaping()),
        SPSA(1e-3, shaping=Shaping()),
    ],
)
@pytest.mark.bits
def test_a_resumed_run_is_the_same_run(estimator, allocator) -> None:
    def fresh() -> Tuner:
        return make(rate=0.1, estimator=estimator, allocator=allocator, batch=4)

    whole, broken = fresh(), fresh()
    for tuner, steps in ((whole, 7), (broken, 4)):
        for _ in tuner.run(steps):
            pass
    resumed = fresh()
    resumed.load_state_dict(copy.deepcopy(broken.state_dict()))
    for _ in resumed.run(3):
        pass
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.asked == whole.asked
    assert not torch.equal(whole.parameters, START)


@pytest.mark.bits
def test_a_state_is_loaded_into_a_tuner_that_has_gone_another_way() -> None:
    """Noise that is kept belongs to its points and draws, not to its step alone."""
    used, other = make(), make(queries=5)
    for tuner, steps in ((used, 4), (other, 3)):
        for _ in tuner.run(steps):
            pass
    state, fresh = other.state_dict(), make()
    for tuner in (used, fresh):
        tuner.load_state_dict(copy.deepcopy(state))
        tuner.step()
    assert torch.equal(used.optimizer.seen[-1], fresh.optimizer.seen[-1])


@pytest.mark.bits
def test_chunks_change_nothing() -> None:
    whole, cut = make(rate=0.1), make(rate=0.1)
    cut._chunk = 5
    for tuner in (whole, cut):
        for _ in tuner.run(4):
            pass
    assert torch.equal(whole.parameters, cut.parameters)


class Some(Allocator):
    """Half of the points get no query."""

    min_queries = 0

    def allocate(self, signal: Signal) -> Tensor:
        return torch.tensor([0, 0, 0, 16, 16, 16])


def test_points_without_queries_are_told_by_what_is_remembered() -> None:
    tuner = make()
    for _ in tuner.run(10):
        pass
    tuner.allocator = Some()
    assert errors_of(tuner, 1)[0] < 0.05


def test_memory_is_bounded() -> None:
    few = replace(OUTPUTS, newest=20)
    tuner = make(outputs=few)
    for _ in tuner.run(9):
        pass
    assert len(tuner.memory["visits"]) == 3  # 20 derivatives of 8 a step
    assert len(tuner.group.estimator.stored._noise) == 3
    small = make(outputs=replace(few, room=2 * N * 8 * D))
    small.load_state_dict(tuner.state_dict())
    small.step()
    assert len(small.memory["visits"]) == 2
    many = make(queries=25, outputs=few)
    assert errors_of(many, 6)[-1] < 0.05  # more in one step than are remembered


@pytest.mark.parametrize("left", [0.0, 1e-6])
def test_a_point_may_become_flat(left) -> None:
    """Its older derivatives are far larger than the new ones then."""
    tuner = make()
    now = {"scale": 1.0}

    def fading(parameters: Tensor, points: Tensor) -> Tensor:
        scale = torch.where(points == 0, now["scale"], 1.0).unsqueeze(1)
        logits = answers(parameters, points)[:, 1:] * scale
        losses = F.cross_entropy(logits, LABELS[points], reduction="none")
        return torch.cat([losses.unsqueeze(1), logits], 1)

    tuner.objective = fading
    for step in range(8):
        now["scale"] = 1.0 if step < 3 else left
        tuner.step()
    at = START.double().requires_grad_()
    fading(at.expand(N, -1), torch.arange(N))[:, 0].mean().backward()
    assert float((tuner.optimizer.seen[-1] - at.grad).norm() / at.grad.norm()) < 0.3


def curved(parameters: Tensor, points: Tensor) -> Tensor:
    """Logits whose Jacobian turns with the parameters, and that fill all directions."""
    source = torch.Generator().manual_seed(9)
    first = torch.randn(N, K, D, generator=source).double()
    second = torch.randn(N, K, D, generator=source).double()
    at = parameters.double().unsqueeze(1)
    logits = ((first[points] * at).sum(2) + (second[points] * (3 * at)).sum(2).sin()) / D**0.5
    losses = F.cross_entropy(logits, LABELS[points], reduction="none")
    return torch.cat([losses.unsqueeze(1), logits], 1)


@pytest.mark.slow
def test_the_mean_is_right_with_jacobians_that_turn_and_fill_the_space() -> None:
    """The first step is taken, the second is looked at: what is remembered is wrong in part."""
    found, theta = [], START + 0.2
    for seed in range(400):
        tuner = Tuner(
            START,
            curved,
            points=N,
            estimator=LikelihoodRatio(1e-3, shaping=Shaping(unbiased=True)),
            queries=6,
            optimizer=Recorded,
            outputs=OUTPUTS,
            seed=seed,
        )
        tuner.step()
        tuner._vector.load(theta)
        tuner.step()
        found.append(tuner.optimizer.seen[-1].double())
    at = theta.double().requires_grad_()
    curved(at.expand(N, -1), torch.arange(N))[:, 0].mean().backward()
    assert at.grad is not None
    assert_mean(torch.stack(found), at.grad, relative=0.2)


def test_drift_follows_how_fast_jacobians_turn() -> None:
    drifts = {}
    for rate in (0.0, 1.0):
        tuner = make(rate=rate, outputs=OUTPUTS)
        tuner.objective = curved
        for _ in tuner.run(12):
            pass
        drifts[rate] = tuner.memory["factors"]["drift"]
    assert drifts[1.0] > 4 * drifts[0.0]


def test_the_reported_error_is_the_real_one() -> None:
    real, said = [], []
    for seed in range(60):
        tuner = make(seed, unbiased=True)
        for _ in range(3):
            report = tuner.step()
        exact = gradient()
        real.append(float((tuner.optimizer.seen[-1] - exact).square().sum()))
        ratio = report.snr["parameters"]  # (|g|^2 - V) / V
        said.append(float(tuner.optimizer.seen[-1].square().sum()) / (1 + ratio))
    assert 0.5 < sum(said) / sum(real) < 2


def test_a_loss_that_is_flat_is_no_error() -> None:
    flat = Tuner(
        START,
        points=N,
        objective=lambda parameters, points: torch.cat(
            [torch.ones(len(points), 1), torch.zeros(len(points), K)], 1
        ),
        estimator=LikelihoodRatio(0.1, shaping=Shaping()),
        queries=4,
        outputs=Outputs(lambda columns: columns[:, 1:], lambda o, p: 1 + o.sum(1)),
    )
    with pytest.warns(UserWarning, match="rounding"):
        flat.step()
    assert torch.equal(flat.parameters, START)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            Outputs(lambda columns: columns[:, 1:], lambda o, p: o.sum(1)),
            "does not reproduce the losses",
        ),
        (Outputs(lambda columns: columns[:, 0], loss), r"must return \(rows, outputs\)"),
        (Outputs(lambda columns: columns[:, 1:] / 0, loss), "not finite"),
        (
            Outputs(lambda c: c[:, 1:], lambda o, p: loss(o, p) + (0 * o).sum(1).sqrt()),
            "derivative",
        ),
    ],
)
def test_outputs_that_do_not_fit_are_explained(outputs, message) -> None:
    with pytest.raises(FlopsError, match=message):
        make(outputs=outputs).step()


def test_outputs_need_shaped_noise_of_independent_draws() -> None:
    with pytest.raises(FlopsError, match="shaped noise"):
        make(estimator=LikelihoodRatio(1e-3))
    with pytest.raises(FlopsError, match="independent draws"):
        make(estimator=LikelihoodRatio(1e-3, noise="orthogonal", shaping=Shaping()))
    for shaping in (Shaping(explore=0.5), Shaping(decay=0.9)):
        with pytest.raises(FlopsError, match="leave explore and decay unset"):
            make(estimator=LikelihoodRatio(1e-3, shaping=shaping))


def test_any_precision_of_outputs_will_do() -> None:
    double = Outputs(lambda c: c[:, 1:].double(), lambda o, p: loss(o.double(), p))
    whole, other = make(), make(outputs=double)
    for tuner in (whole, other):
        tuner.step()
    torch.testing.assert_close(other.optimizer.seen[0], whole.optimizer.seen[0])


def test_another_number_of_outputs_is_refused() -> None:
    tuner = make()
    tuner.step()
    fewer = make(outputs=Outputs(lambda c: c[:, 1:], lambda o, p: o[:, 0]))
    fewer.load_state_dict(tuner.state_dict())
    fewer.objective = lambda z, p: answers(z, p)[:, :1].repeat(1, 2)
    with pytest.raises(FlopsError, match="number of outputs"):
        fewer.step()
