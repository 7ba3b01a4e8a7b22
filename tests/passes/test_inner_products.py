"""Inner products by pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flops.passes.inner_products import inner, squared_norm


@pytest.mark.parametrize(
    "a",
    [
        torch.randn(300, 1001),
        torch.randn(300, 1001).T,
        torch.randn(7).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(0, 4).T,
        torch.randn(1, 5).expand(3, 5),
        torch.full((70_000,), 1e25),
        torch.full((70_000,), 1e-25),
    ],
)
def test_both_are_sums_in_double_precision(a: Tensor) -> None:
    expected = float(a.double().square().sum())
    assert inner(a, a) == pytest.approx(expected, rel=1e-12)
    assert squared_norm(a) == pytest.approx(expected, rel=1e-5)


def test_tensors_may_lie_differently_in_memory() -> None:
    a, b = torch.randn(400, 900), torch.randn(900, 400).T
    assert inner(a, b) == pytest.approx(float((a.double() * b.double()).sum()))
