"""What hangs on rounding must not decide: signs of eigenvectors, and ridges that are alike."""

from __future__ import annotations

import pytest
import torch

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.subspace.moments import Factor, signed
from tests.support.parallel_cases import Words, batch, losses


def test_every_column_has_its_largest_entry_positive() -> None:
    vectors = torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64)).Q
    found = signed(vectors)
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(found.abs(), vectors.abs())
    flips = torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    assert torch.equal(signed(vectors * flips), found)


def test_entries_that_are_alike_but_for_rounding_count_as_one() -> None:
    near = torch.tensor([[1 + 1e-12], [-1.0]], dtype=torch.float64)
    other = torch.tensor([[-1.0], [1 + 1e-12]], dtype=torch.float64)
    assert signed(near)[0] > 0
    assert signed(other)[0] > 0


def test_eigenpairs_do_not_hang_on_the_sign_that_lapack_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.randn(9, 5, dtype=torch.float64)
    factor = Factor(rows.T @ rows, torch.zeros(5, 0), torch.zeros(0), 0.0)
    vectors, values, _ = factor.eigenpairs()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (eigh(m)[0], -eigh(m)[1]))
    assert torch.equal(factor.eigenpairs()[0], vectors)
    torch.testing.assert_close((vectors * values) @ vectors.T, rows.T @ rows)


def test_where_all_directions_are_asked_the_ridge_stays() -> None:
    """Three outputs and six queries: no ridge is better than another but by rounding."""
    torch.manual_seed(0)
    model = Words().double()
    group = Group(model.late, LikelihoodRatio(targets="stage", shaping=Shaping()), 6, name="late")
    model.table.requires_grad_(False)
    model.early.requires_grad_(False)
    fg = ForwardGradient(model, losses, [group])
    asked_all = 0
    for step in range(16):
        words, targets, index = batch(step)
        before = fg.memory["late"].get("ridge", 1.0) if "late" in fg.memory else 1.0
        report = fg.estimate(words, targets, index=index)
        if report.shaping["late"].k >= 3:
            asked_all += 1
            assert fg.memory["late"]["ridge"] == before
    assert asked_all > 3
