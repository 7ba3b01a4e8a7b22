"""The variance of orthogonal draws, by enumeration of all the sets that can be drawn.

For a fixed orthogonal basis, r of its d directions are drawn without replacement. With the noise
added to the parameters themselves (F = d) and a linear loss, the trace of one draw's covariance is
d |g|^2 - |g|^2; `variance` leaves the second, small term out, like that of independent draws.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.diagnostics.traces import spend_counts
from flops.estimators.base import Estimate
from flops.estimators.variance import variance
from tests.support.noise import noise

D = 5


def basis() -> Tensor:
    """Orthogonal rows of length sqrt(d)."""
    return torch.linalg.qr(torch.randn(D, D).double()).Q * D**0.5


def estimated(derivatives: Tensor, points: list[int]) -> Estimate:
    return Estimate(
        derivatives=derivatives,
        points=torch.tensor(points),
        factors=torch.full((max(points) + 1,), float(D)).double(),
        directions=D,
    )


@pytest.mark.parametrize("draws", [1, 2, 3, 4, 5, 6, 8, 10, 14])
def test_it_is_that_of_all_sets_of_directions(draws: int) -> None:
    g, blocks, rest = torch.randn(D).double(), draws // D, draws % D
    last, errors, told = basis(), [], []
    for chosen in combinations(range(D), rest):
        z = torch.cat([*(basis() for _ in range(blocks)), last[list(chosen)]])
        w = z @ g
        errors.append(float((w @ z / draws - g).square().sum()))
        told.append(variance(estimated(w, [0] * draws), 1))
    measured, predicted = sum(errors) / len(errors), sum(told) / len(told)
    assert predicted * (1 - 1 / D) == pytest.approx(measured, rel=1e-12, abs=1e-25)
    assert (predicted == 0) == (rest == 0)


def test_points_count_by_their_own_number_of_draws() -> None:
    w = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 2.0]).double()
    # One draw: 9 * 5 / 1. Five: exact. None: nothing. Over B^2 = 9.
    found = variance(estimated(w, [0, 2, 2, 2, 2, 2]), 3)
    assert found == pytest.approx(45 / 9, rel=1e-12)
    # Two draws, mean square 5: 5 * 5 * 2 / 2^2 * (5 - 2) / (5 - 1).
    found = variance(estimated(w[:2], [0, 0]), 1)
    assert found == pytest.approx(5 * 5 * 2 / 4 * 3 / 4, rel=1e-12)


@pytest.mark.parametrize("draws", [1, 3, 5, 7])
def test_the_engine_reports_it_from_its_own_draws(draws: int) -> None:
    """A linear loss of a bias: the error of each draw is known, and so is the trace."""
    model = nn.Linear(2, D).double()
    model.weight.requires_grad_(False)
    x, g = torch.randn(3, 2).double(), torch.randn(3, D).double()
    estimator = LikelihoodRatio(1e-3, noise="orthogonal")
    fg = ForwardGradient(model, lambda out, g: (out * g).sum(1), Group(model, estimator, draws))
    with fg.session(x, g) as session:
        queries = session.queries("model", fg.key(0), {})
        counts = torch.full((3,), draws)
        spent = spend_counts(session, fg.groups[0], session.layout.bindings[0], queries, counts)
    predicted, expected = variance(spent.step.estimate, 3), 0.0
    for j in range(3):
        z = noise("orthogonal", (*fg.key(0), j), draws, D)
        square = float((z @ g[j]).square().mean())
        rest = draws % D
        expected += D * square * rest / draws**2 * (D - rest) / (D - 1) / 9
    # Draws are in single precision.
    assert predicted == pytest.approx(expected, rel=1e-5, abs=1e-20)
    assert spent.step.noise == pytest.approx(predicted)
