"""What the tuner estimates: the gradient of plain functions, as the engine does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.blackbox import Objective, Tuner
from tests.statistical.helpers import assert_mean
from tests.support.recorded import Recorded
from tests.support.tuned_functions import START, D, N, linear, quadratic


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
        objective,
        points=N,
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
@pytest.mark.parametrize("objective", [pytest.param(linear, marks=pytest.mark.slow), quadratic])
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
        tuner = Tuner(
            START, quadratic, points=N, estimator=estimator, queries=D, optimizer=Recorded, seed=3
        )
        order = tuner.ask().points
        model.zero_grad()
        engine.estimate(torch.ones(N, 1), order, index=order)
        tuner.step()
        assert model.theta.weight.grad is not None
        expected = model.theta.weight.grad.flatten()
        torch.testing.assert_close(tuner.optimizer.seen[0], expected, rtol=1e-4, atol=1e-4)
