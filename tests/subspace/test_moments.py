"""Moments and their sketches. What hangs on rounding must not decide: signs, ridges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.subspace.basis import signed
from flops.subspace.moments import DENSE, FLAT, SKETCH, Change, Factor, Moments, Weights
from tests.conftest import cosine, exact, squared
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
    group = Group(
        model.late, LikelihoodRatio(targets="stage", shaping=Shaping(outputs=False)), 6, name="late"
    )
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


def test_a_sketch_finds_what_a_matrix_finds() -> None:
    """An axis above 2,048: leading eigenpairs and trace of a drifting low-rank moment."""
    size = DENSE + 100
    basis = torch.linalg.qr(torch.randn(size, 4, dtype=torch.float64)).Q
    scale = torch.tensor([8.0, 4.0, 2.0, 1.0]).double()
    sketch, none = Factor.empty(size, torch.float64), torch.zeros(size, 0).double()
    assert sketch.matrix is None
    dense = torch.zeros(size, size).double()
    for number in range(6):
        rows = torch.randn(40, 4).double() * scale.sqrt() @ basis.T
        noisy = rows + 0.02 * torch.randn(40, size).double()
        change = Change(noisy, noisy[:5], 0.01, none, none[0])
        sketch = sketch.updated(0.9, change, number)
        dense = 0.9 * dense + change.times(torch.eye(size).double())
    vectors, values, rest = sketch.eigenpairs()
    true = torch.linalg.eigvalsh(dense).flip(0)
    torch.testing.assert_close(values[:4], true[:4], rtol=1e-3, atol=0)
    assert float((vectors[:, :4].T @ basis).square().sum()) == pytest.approx(4, abs=0.1)
    left_out = (dense.trace() - values.sum()) / (size - len(values))
    assert rest == pytest.approx(max(0.0, float(left_out)), rel=1e-6, abs=1e-9)


def test_a_large_site_learns_from_its_sketch() -> None:
    """A site that starts as a sketch stays one, so that one problem can be learned both ways."""
    width = SKETCH + 32
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2, bias=False)).double()
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    truth = exact(model, squared, x, y)["0.weight"]
    late = []
    for dense in (True, False):
        groups = [
            Group(
                model[0],
                LikelihoodRatio(1e-6, shaping=Shaping(outputs=False)),
                queries=8,
                name="site",
            ),
            Group(model[1], LikelihoodRatio(), queries=2),
        ]
        fg = ForwardGradient(model, squared, groups)
        if not dense:
            none = torch.zeros(width, 0).double()
            sketch = Factor(None, none, none[0], 0.0)
            empty = Moments(Factor.empty(1, torch.float64), sketch)
            fg.memory["site"] = {"moments": [empty.to_memory()]}
        found = []
        for _ in range(100):
            model.zero_grad()
            fg.estimate(x, y)
            found.append(cosine(model[0].weight.grad, truth))
        assert (fg.memory["site"]["moments"][0]["channels"]["matrix"] is None) != dense
        assert sum(found[:4]) / 4 < 0.8
        late.append(sum(found[-5:]) / 5)
    assert min(late) > 0.98


def of_values(*values: float) -> Factor:
    """A moment along the axes."""
    matrix = torch.diag(torch.tensor(values).double())
    return Factor(matrix, matrix[:, :0], matrix[0, :0], 0.0)


def test_weights_grow_with_the_eigenvalues_from_a_flat_share() -> None:
    weights = Weights.of(of_values(4.0, 1.0, 0.0), torch.eye(3).double())
    assert (weights.values / weights.values[0]).tolist() == [1.0, FLAT + (1 - FLAT) / 4, FLAT]


def test_weights_do_not_change_the_energy() -> None:
    """Else a site whose gradient is in few tokens would count more than one where it is in all."""
    values = torch.tensor([4.0, 1.0, 0.5, 0.5]).double()
    weights = Weights.of(of_values(*values.tolist()), torch.eye(4).double())
    assert float((weights.values * values).sum()) == pytest.approx(6)
    sketch = Factor(None, torch.eye(4).double()[:, :2], values[:2], 6.0)
    weights = Weights.of(sketch, sketch.vectors)
    energy = float((weights.values * values[:2]).sum()) + weights.rest
    assert energy == pytest.approx(6)


def test_a_sketch_has_one_weight_for_the_unknown_directions() -> None:
    """As the moment would have, in which they are equal."""
    whole = of_values(4.0, 1.0, 0.5, 0.5)
    vectors = torch.eye(4).double()
    sketch = Factor(None, vectors[:, :2], torch.tensor([4.0, 1.0]).double(), 6.0)
    x = torch.arange(8.0).view(4, 2).double()
    found, expected = Weights.of(sketch, vectors[:, :2]), Weights.of(whole, vectors)
    torch.testing.assert_close(found.root(x), expected.root(x))
    assert found.mean() == pytest.approx(expected.mean())


@pytest.mark.parametrize("factor", [None, of_values(0.0, 0.0)], ids=["none", "no data"])
def test_without_data_all_weights_are_one(factor: Factor | None) -> None:
    weights = Weights.of(factor, torch.eye(2).double())
    x = torch.arange(6.0).view(2, 3).double()
    torch.testing.assert_close(weights.root(x), x)
    assert weights.mean() == 1
