"""What the loss reads of the outputs, and its derivative there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from flops.losses import LabelWords
from flops.passes.batch import Batch
from flops.passes.loss_view import DIRECTIONS, EVERY, LossView, loss_view


def entropy(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, targets, reduction="none")


def view_of(outputs: Any, targets: Tensor, loss: Any = entropy) -> LossView | None:
    batch = Batch(torch.zeros(len(targets), 2), targets, loss)
    with torch.no_grad():
        return loss_view(batch, outputs, None)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: ImageClassifierOutput(logits=x)])
def test_residuals_are_softmax_minus_one_hot(wrap: Any) -> None:
    logits, y = torch.randn(7, 5), torch.randint(0, 5, (7,))
    view = view_of(wrap(logits), y)
    assert view is not None
    truth = logits.softmax(1) - F.one_hot(y, 5)
    torch.testing.assert_close(view.residuals, truth)
    torch.testing.assert_close(view.read(wrap(logits)), logits)
    change = torch.randn(7, 5)
    own, features = view.derivatives(change, torch.arange(7))
    torch.testing.assert_close(own, (truth * change).sum(1))
    torch.testing.assert_close(features, change)


def test_a_model_may_return_its_losses() -> None:
    view = view_of(torch.randn(6), torch.zeros(6), lambda o, t: o**2)
    assert view is not None
    torch.testing.assert_close(view.residuals, 2 * view.clean)
    assert view.read(torch.randn(3)).shape == (3, 1)


def test_roots_are_those_of_the_second_moment_of_unit_residuals() -> None:
    logits, y = 3 * torch.randn(40, 6).double(), torch.randint(0, 6, (40,))
    view = view_of(logits, y)
    assert view is not None
    unit = F.normalize(logits.softmax(1) - F.one_hot(y, 6), dim=1)
    torch.testing.assert_close(view.roots.T @ view.roots, unit.T @ unit / 40)
    assert len(view.roots) == 5  # residuals sum to zero


def test_of_many_outputs_directions_of_residuals_are_features() -> None:
    logits, y = torch.randn(50, 2 * EVERY).double(), torch.randint(0, 2 * EVERY, (50,))
    view = view_of(logits, y)
    assert view is not None
    assert view.name is None
    assert view.basis is not None
    assert view.basis.shape == (DIRECTIONS, 2 * EVERY)
    torch.testing.assert_close(view.basis @ view.basis.T, torch.eye(DIRECTIONS).double())
    change = torch.randn(3, 2 * EVERY).double()
    torch.testing.assert_close(view.features(change), change @ view.basis.T)


def test_only_what_the_loss_reads_is_looked_at() -> None:
    logits, y = torch.randn(4, 1, 30), torch.tensor([0, 1, 1, 0])
    words = LabelWords((7, 21))
    batch = Batch(torch.zeros(4, 2), y, words)
    with torch.no_grad():
        view = loss_view(batch, SimpleNamespaceLike(logits=logits), torch.tensor([0]))
    assert view is not None
    assert view.columns is not None
    assert view.columns.tolist() == [7, 21]
    torch.testing.assert_close(view.clean, logits[:, 0, [7, 21]])
    assert len(view.roots) == 1  # two words: one margin


class SimpleNamespaceLike(ImageClassifierOutput):
    """Outputs with logits, as of a language model."""


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o.argmax(1) != t).double(),
        lambda o, t: F.cross_entropy(o.detach(), t, reduction="none"),
        lambda o, t: torch.tensor([float(i) for i in o.numpy().sum(1)]),
        lambda o, t: torch.zeros(len(o)) * o.sum(1),
        lambda o, t: (o.sum(1) * 0 + 1e-30).log() * torch.inf,
    ],
    ids=["integers", "detached", "numpy", "constant", "infinite"],
)
def test_without_a_derivative_there_is_no_view(loss: Any) -> None:
    assert view_of(torch.randn(4, 3), torch.randint(0, 3, (4,)), loss) is None


def test_masked_logits_give_no_view() -> None:
    logits = torch.randn(4, 3)
    logits[0, 2] = -torch.inf
    assert view_of(logits, torch.tensor([0, 2, 1, 0])) is None


def test_an_exception_of_a_signal_handler_is_not_swallowed() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        view_of(torch.randn(4, 3), torch.zeros(4), loss)


def test_outputs_that_are_no_tensors_give_no_view() -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return torch.tensor([len(text) for text in outputs.texts]).double()

    assert view_of(SimpleNamespace(texts=["a", "bc"]), torch.zeros(2), loss) is None


def test_the_engine_looks_only_where_a_group_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from flops import ForwardGradient, Group, LikelihoodRatio, Shaping

    model = nn.Linear(3, 2)
    seen = []
    monkeypatch.setattr("flops.engine.step.loss_view", lambda *a: seen.append(a) or loss_view(*a))
    for shaping, looks in [(None, 0), (Shaping(outputs=False), 0), (Shaping(), 1)]:
        seen.clear()
        group = Group(model, LikelihoodRatio(shaping=shaping), 4)
        ForwardGradient(model, entropy, group).estimate(
            torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        )
        assert len(seen) == looks


def test_outputs_that_a_point_does_not_read_are_left_out() -> None:
    """The second point has padding where the first has a target."""
    outputs = torch.randn(2, 3).double()
    weights = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]).double()
    view = loss_view(Batch(torch.zeros(2, 1), weights, weighted), outputs, None)
    assert view is not None
    own, features = view.derivatives(torch.ones(2, 3).double(), torch.arange(2))
    assert features.tolist() == [[1, 1, 1], [0, 1, 1]]
    torch.testing.assert_close(own, (2 * outputs * weights).sum(1))


def weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs.square() * weights).sum(1)


@pytest.mark.parametrize("margin", [60.0, 1e4])
def test_a_batch_that_is_fitted(margin: float) -> None:
    """Squares of the residuals are below what single precision can hold; then all are zero."""
    outputs = torch.tensor([[margin, 0.0], [0.0, margin]])
    batch = Batch(torch.zeros(2, 1), torch.tensor([0, 1]), entropy)
    view = loss_view(batch, outputs, None)
    if view is not None:
        assert bool(torch.isfinite(view.roots).all())
    assert (view is None) == (margin > 100)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")
