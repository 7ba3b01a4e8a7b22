"""The posterior and its leave-one-out residuals, by brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flops.subspace.regression import coherence, correction_noise, posterior


def test_posterior_and_leave_one_out_by_brute_force() -> None:
    size, k = 7, 3
    z, r = torch.randn(1, size, k).double(), torch.randn(1, size).double()
    prior, noise = torch.tensor([0.5, 0.3, 0.1]).double(), torch.tensor([0.2]).double()
    fit = posterior((z * prior) @ z.transpose(1, 2), r, noise, torch.ones(1, size).bool())

    def solve(rows: list[int]) -> Tensor:
        a = z[0, rows]
        precision = torch.diag(1 / prior) + a.T @ a / noise
        return torch.linalg.inv(precision) @ a.T @ r[0, rows] / noise

    def lifted(weights: Tensor) -> Tensor:
        return prior * (weights @ z[0])

    torch.testing.assert_close(lifted(fit.alpha[0]), solve(list(range(size))))
    without = [solve([j for j in range(size) if j != i]) for i in range(size)]
    for i, rest in enumerate(without):
        torch.testing.assert_close(fit.held_out[0, i], r[0, i] - z[0, i] @ rest)
    torch.testing.assert_close(lifted(fit.without[0]), torch.stack(without).mean(0))


def test_padding_changes_nothing() -> None:
    z, r = torch.randn(1, 4, 6).double(), torch.randn(1, 4).double()
    kernel, noise = z @ z.transpose(1, 2), torch.tensor([0.1]).double()
    plain = posterior(kernel, r, noise, torch.ones(1, 4).bool())
    real = torch.arange(6).unsqueeze(0) < 4
    wide = torch.randn(1, 6, 6).double()
    wide[:, :4, :4] = kernel
    padded = posterior(wide, torch.cat([r, torch.zeros(1, 2).double()], 1), noise, real)
    for name in ("alpha", "held_out", "without"):
        torch.testing.assert_close(getattr(padded, name)[:, :4], getattr(plain, name))
        assert not getattr(padded, name)[:, 4:].any()


def test_coherence_is_what_the_summed_corrections_have_beyond_noise() -> None:
    """Independent corrections of known variance: the squared norm of their sum is all noise."""
    n, size, dimensions = torch.tensor([2, 4, 8, 0]), 4, 2000
    error = torch.tensor([1.0, 2.0, 3.0, 9.0]).double()
    spread = (error / n.clamp(min=1)).sqrt().unsqueeze(1) * (n > 0).unsqueeze(1)
    correction = spread * torch.randn(size, dimensions).double()
    measured: Any = SimpleNamespace(iso=n, fitted=n, space=SimpleNamespace(dimensions=dimensions))
    found: Any = SimpleNamespace(error=error, correction=correction)
    noise = correction_noise(measured, found).sum()
    sums: Any = SimpleNamespace(correction=correction.sum(0), errors=[0, noise])
    whole, noise = coherence(sums)
    assert noise == pytest.approx(dimensions * (1 / 2 + 2 / 4 + 3 / 8))
    assert whole == pytest.approx(noise, rel=0.2)
