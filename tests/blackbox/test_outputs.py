"""Outputs of a black box: the view of its loss, and what is learned from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flops.blackbox import Outputs
from flops.passes.batch import Batch
from flops.passes.loss_view import loss_view

K = 4
LABELS = torch.arange(9) % K


def losses(outputs: Tensor, points: Tensor) -> Tensor:
    return F.cross_entropy(outputs, LABELS[points], reduction="none")


def columns_of(logits: Tensor, points: Tensor) -> Tensor:
    return torch.cat([losses(logits, points).unsqueeze(1), logits], 1)


OUTPUTS = Outputs(lambda columns: columns[:, 1:], losses)


def test_the_view_is_the_engines() -> None:
    logits, points = torch.randn(5, K), torch.tensor([7, 0, 3, 4, 2])
    view = OUTPUTS.view(columns_of(logits, points), points)
    batch = Batch(torch.zeros(5, 1), LABELS[points], lambda o, y: losses(o, points))
    engine = loss_view(batch, logits, None)
    assert engine is not None
    for name in ("clean", "residuals", "roots"):
        assert torch.equal(getattr(view, name), getattr(engine, name))
    assert (view.name, view.basis, view.size) == (engine.name, None, K)


def test_rows_that_failed_have_no_outputs() -> None:
    points = torch.tensor([0, 1, 2])
    logits = torch.randn(3, K)
    columns = columns_of(logits, points)
    view = OUTPUTS.view(columns, points)
    columns[1] = torch.nan
    found = OUTPUTS.results(columns, view)
    assert found.outputs is not None
    assert torch.equal(found.outputs[[0, 2]], logits[[0, 2]])
    assert bool(found.outputs[1].isnan().all())
    nothing = OUTPUTS.results(torch.full((2, 1), torch.nan), view)
    assert nothing.outputs is not None
    assert nothing.outputs.shape == (2, K)


@pytest.mark.parametrize("known", [False, True])
def test_outputs_without_a_derivative_count_only_where_the_loss_is_known(known: bool) -> None:
    """A hinge loss is flat at some points, whose outputs will be read later."""
    logits, points = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])

    def hinge(outputs: Tensor, which: Tensor) -> Tensor:
        return (1 - outputs).clamp(min=0).sum(1)

    view = loss_view(Batch(torch.zeros(2, 1), points, hinge), logits, None)
    if known:
        columns = torch.cat([hinge(logits, points).unsqueeze(1), logits], 1)
        view = Outputs(lambda c: c[:, 1:], hinge).view(columns, points)
    assert view is not None
    own, features = view.derivatives(torch.ones(2, 2), points)
    assert own.tolist() == [-1, -1]
    assert features.tolist() == ([[1, 1], [1, 1]] if known else [[0, 1], [1, 0]])
