"""The regression of a step, against dense matrices and one fit for every query left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flops.subspace.measurements import FITTED
from flops.subspace.regression import (
    Regression,
    StepSums,
    explained_by_site,
    explained_variance,
    regress,
)
from tests.support.shaped_cases import Case, case

RIDGES = (1.0, 1 / 3, 3.0)
LEAST = 1e-6  # noise, relative to the kernel
KINDS = pytest.mark.parametrize("masked", [False, True])
PREDICTED = pytest.mark.parametrize("predicted", [False, True])


def known_part(of: Case, j: int) -> Tensor:
    """What was measured of a point's gradient."""
    inside = of.measurements.c[j] @ of.directions
    if of.measurements.predicted is not None and of.measurements.a is not None:
        inside = inside + of.measurements.a[j] * of.measurements.predicted[j]
    return inside


def covariance(of: Case, j: int) -> tuple[Tensor, float]:
    """Prior of the unmeasured part, and its trace."""
    u = of.directions
    prior = torch.where(of.measurements.measured[j], 0.0, of.design.prior.expand(4, -1)[j])
    rest = torch.eye(16).double() - u.T @ u
    trace = float(prior.sum()) + of.known.rest * (16 - of.known.size)
    return (u.T * prior) @ u + of.known.rest * rest, trace


def fit(prior: Tensor, z: Tensor, r: Tensor, noise: float) -> Tensor:
    """Posterior mean, given residuals along z."""
    root = torch.linalg.cholesky(prior + 1e-14 * torch.eye(16).double())
    a = z @ root
    return root @ torch.linalg.solve(a.T @ a + noise * torch.eye(16).double(), a.T @ r)


def scores(of: Case, j: int, ridge: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Posterior mean, its means without each query, held-out residuals; and all residuals."""
    whole = of.isotropic(j)
    z = whole * of.mask[j]
    r = of.measurements.w[j, : len(z)] - z @ known_part(of, j)
    n = min(len(z), FITTED)
    prior, trace = covariance(of, j)
    noise = ridge * trace + LEAST
    without = torch.stack(
        [fit(prior, z[:n][keep], r[:n][keep], noise) for keep in ~torch.eye(n, dtype=torch.bool)]
    )
    held_out = r[:n] - (z[:n] * without).sum(1)
    return fit(prior, z[:n], r[:n], noise), without, held_out, r


def check(of: Case, found: Regression, ridge: float) -> None:
    for j in range(4):
        whole = of.isotropic(j)
        z, n = whole * of.mask[j], min(len(whole), FITTED)
        tail, without, held_out, r = scores(of, j, ridge)
        u = of.directions[of.measurements.measured[j]]
        torch.testing.assert_close(found.inside[j], known_part(of, j))
        torch.testing.assert_close(found.tail[j], tail, rtol=1e-6, atol=1e-8)
        correction = without.mean(0) - tail + held_out @ whole[:n] / n
        torch.testing.assert_close(found.correction[j], correction, rtol=1e-6, atol=1e-7)
        outside = r @ (z - z @ u.T @ u) / len(z)
        torch.testing.assert_close(found.outside[j], outside)
        assert float(found.missed[j]) == pytest.approx(float(r.square().mean()))
        assert float(found.error[j]) == pytest.approx(float(held_out.square().mean()), rel=1e-6)
        energy = known_part(of, j).square().sum() + r.square().mean()
        assert float(found.energy[j]) == pytest.approx(float(energy))


@KINDS
@PREDICTED
@pytest.mark.parametrize("ridge", [1.0, 0.05])
def test_against_dense_matrices(masked: bool, predicted: bool, ridge: float) -> None:
    of = case(masked, predicted)
    assert of.known.rest > 0
    found = regress(of.measurements, ridge, tune=False)
    check(of, found, ridge)
    assert found.ridge == ridge


def test_one_isotropic_draw_is_held_out_of_a_fit_to_nothing() -> None:
    of = case(iso=(1, 2, 1, 3))
    check(of, regress(of.measurements, 0.3, tune=False), 0.3)


@PREDICTED
def test_draws_beyond_the_fit_are_in_the_averages(predicted: bool) -> None:
    of = case(predicted=predicted, iso=(3, FITTED + 2, 4, 3))
    check(of, regress(of.measurements, 0.3, tune=False), 0.3)


@KINDS
@pytest.mark.parametrize("ridge", [1.0, 1e-4, 100.0])
def test_the_ridge_with_the_least_held_out_residuals(masked: bool, ridge: float) -> None:
    """Relative to each point's residuals, and weighted by its queries; within bounds."""
    of = case(masked)
    sums = []
    for factor in RIDGES:
        total = 0.0
        for j in range(4):
            _, _, held_out, r = scores(of, j, ridge * factor)
            total += float(held_out.square().sum() / r.square().sum()) * len(r)
        sums.append(total)
    best = sums.index(min(sums))
    expected = ridge
    if sums[best] < (1 - 1e-6) * sums[0]:
        expected = min(100.0, max(1e-4, ridge * RIDGES[best]))
    assert regress(of.measurements, ridge, tune=True).ridge == pytest.approx(expected, rel=1e-12)


def result(inside: Tensor, outside: Tensor, missed: Tensor) -> Regression:
    zero = torch.zeros_like(inside)
    return Regression(inside, zero, outside, zero, missed, missed, 1.0)


def test_explained_variance_and_its_standard_error() -> None:
    of = case()
    missed = torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    found = result(of.gradients, torch.zeros_like(of.gradients), missed)
    energy = of.gradients.square().sum(1) + missed
    share = float(missed.sum() / energy.sum())
    error = float((missed - share * energy).square().sum().sqrt() / energy.sum())
    assert explained_variance(StepSums.of(of.measurements, found)) == pytest.approx(
        (1 - share, error), rel=1e-12
    )


def test_residuals_are_split_over_the_sites_by_what_is_seen_there() -> None:
    """Outside, |g_s|^2 (1 + 1/n) + size |g|^2 / n is expected of a site."""
    of = case()
    missed = torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    outside = 3 * of.gradients.flip(0)
    found = result(of.gradients, outside, missed)
    n, sizes = of.measurements.iso.double(), (slice(0, 12), slice(12, 16))
    inside = [float(of.gradients[:, s].square().sum()) for s in sizes]
    seen = []
    for s in sizes:
        square = outside[:, s].square().sum(1) - missed * (s.stop - s.start) / n
        seen.append(float((square * n / (n + 1)).sum()))
    assert min(seen) > 0
    left = [float(missed.sum()) * share / sum(seen) for share in seen]
    expected = [a / (a + b) for a, b in zip(inside, left, strict=True)]
    assert explained_by_site(StepSums.of(of.measurements, found)) == pytest.approx(
        expected, rel=1e-12
    )


def test_a_site_without_any_signal_is_explained() -> None:
    of = case()
    outside = of.gradients.clone()
    outside[:, 12:] = 0
    found = result(of.gradients, 9 * outside, torch.full((4,), 0.1, dtype=torch.double))
    first, second = explained_by_site(StepSums.of(of.measurements, found))
    assert second == 1
    inside = float(of.gradients[:, :12].square().sum())
    assert first == pytest.approx(inside / (inside + 0.4), rel=1e-12)
