"""Exact before statistical: over all sign vectors the mean is the gradient, to rounding.

On a loss that is quadratic in what is perturbed, odd moments of signs vanish exactly, so every
estimator's mean over all sign vectors equals the gradient itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, Group, LikelihoodRatio
from flops.perturb import draws
from flops.perturb.random import NoiseStream
from tests.conftest import cosine, estimate, exact, flat, sign_vectors, squared

SIGMA = 0.3  # large: a quadratic has no smoothing bias


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point goes through all sign vectors, in order."""

    def take(self: NoiseStream, point: int, first: int, count: int, out: Tensor) -> None:
        out[:, : self._size] = sign_vectors(self._size)[first : first + count]

    monkeypatch.setattr(NoiseStream, "take", take)


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    model = nn.Linear(3, 2).to(dtype)
    return model, torch.randn(4, 3, dtype=dtype), torch.randn(4, 2, dtype=dtype)


@pytest.mark.usefixtures("enumerated")
@pytest.mark.parametrize("baseline", ["clean", "antithetic", "none"])
@pytest.mark.parametrize("targets", ["leaf", "block", "stage"])
def test_likelihood_ratio(baseline: str, targets: str) -> None:
    model, x, y = problem()
    estimator = LikelihoodRatio(SIGMA, targets, baseline, "rademacher")
    groups = [Group(model, estimator, queries=4 * estimator.unit)]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("enumerated")
def test_likelihood_ratio_in_single_precision() -> None:
    model, x, y = problem(torch.float32)
    groups = [Group(model, LikelihoodRatio(SIGMA, noise="rademacher"), queries=4)]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    assert cosine(flat(found), flat(truth)) >= 0.9999


@pytest.mark.usefixtures("enumerated")
@pytest.mark.parametrize(
    "estimator",
    [ES(SIGMA), ES(SIGMA, baseline="none"), ES(SIGMA, baseline="antithetic"), SPSA(SIGMA)],
)
def test_independent_parameter_noise(estimator: ES | SPSA) -> None:
    model, x, y = problem()
    size = 2 + 3 + 2  # a and b of the weight, and the bias
    groups = [Group(model, estimator, queries=2**size * estimator.unit)]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("estimator", [ES(SIGMA, shared=True), SPSA(SIGMA, shared=True)])
def test_shared_parameter_noise(estimator: ES | SPSA, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    size = sum(p.numel() for p in model.parameters())

    def fill(kind: str, key: tuple[int, ...], out: Tensor) -> Tensor:
        return out.copy_(sign_vectors(size)[key[-1]])

    monkeypatch.setattr(draws, "fill", fill)
    groups = [Group(model, estimator, queries=2**size * estimator.unit)]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("draws", [2, 4, 6])
def test_orthogonal_noise_is_exact_once_it_spans_the_site(draws: int) -> None:
    model, x, y = problem()
    groups = [Group(model, LikelihoodRatio(1e-7, noise="orthogonal"), queries=draws)]
    found, truth = estimate(model, squared, x, y, groups), exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-5, atol=1e-7)
