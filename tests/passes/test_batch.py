"""Batches of every make: what is cut into rows, what is passed whole, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flops import BatchError, ForwardGradient, Group, LikelihoodRatio, Shared
from flops.passes.batch import Batch
from tests.conftest import flat, gradients, squared

ROWS = torch.tensor([2, 0, 2])
X, Y = torch.arange(8.0).view(4, 2), torch.arange(4.0)


class Catch(nn.Module):
    """Keeps its arguments and returns one value per row."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.args, self.kwargs = args, kwargs
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return torch.zeros(len(first))


def run(inputs: Any, targets: Any = None, rows: Tensor | None = ROWS) -> tuple[Any, Any, Any]:
    """Positional arguments, keyword arguments and targets as the user's code gets them."""
    model, seen = Catch(), []

    def loss_fn(outputs: Tensor, targets: Any) -> Tensor:
        seen.append(targets)
        return torch.zeros(4 if rows is None else len(rows))

    batch = Batch(inputs, targets, loss_fn)
    assert batch.size == 4
    batch.losses(model, rows)
    return model.args, model.kwargs, seen[0]


def test_tensors_are_cut() -> None:
    (x,), kwargs, y = run(X, Y)
    assert torch.equal(x, X[ROWS])
    assert torch.equal(y, Y[ROWS])
    assert kwargs == {}


def test_without_rows_everything_is_passed_as_given() -> None:
    (x,), _, y = run(X, Y, rows=None)
    assert x is X
    assert y is Y


def test_tuples_are_positional_and_dicts_are_named() -> None:
    args, _, y = run((X, 3, None, X + 1), (Y, {"a": Y + 1, "b": "text"}))
    assert torch.equal(args[0], X[ROWS])
    assert args[1:3] == (3, None)
    assert torch.equal(args[3], X[ROWS] + 1)
    assert torch.equal(y[0], Y[ROWS])
    assert torch.equal(y[1]["a"], Y[ROWS] + 1)
    assert y[1]["b"] == "text"
    _, kwargs, _ = run({"pixels": X, "flag": True})
    assert torch.equal(kwargs["pixels"], X[ROWS])
    assert kwargs["flag"] is True


def test_what_has_another_first_size_is_shared() -> None:
    table, scalar = torch.ones(1, 2), torch.tensor(2.0)
    args, _, y = run((X, table, scalar), (Y, table))
    assert args[1] is table
    assert args[2] is scalar
    assert y[1] is table


def test_shared_is_never_cut_though_its_size_matches() -> None:
    prompts = torch.ones(4, 7)
    _, kwargs, y = run({"prompts": Shared(prompts), "pixels": X}, (Y, Shared(prompts)))
    assert kwargs["prompts"] is prompts
    assert torch.equal(kwargs["pixels"], X[ROWS])
    assert y[1] is prompts
    whole, _, _ = run((Shared(prompts), X), Y, rows=None)
    assert whole[0] is prompts


def test_lists_of_objects_are_cut_on_both_sides() -> None:
    texts = ["a", "b", "c", "d"]
    args, _, y = run((X, texts), texts)
    assert args[1] == ["c", "a", "c"]
    assert y == ["c", "a", "c"]
    _, _, y = run(X, {"text": texts, "other": [1, 2]})
    assert y == {"text": ["c", "a", "c"], "other": [1, 2]}
    _, _, y = run(X, [{"box": Y[i]} for i in range(4)])
    assert [int(item["box"]) for item in y] == [2, 0, 2]


def test_a_list_of_tensors_is_several_targets() -> None:
    _, _, y = run(X, [Y, Y + 1])  # as a loader collates pairs
    assert torch.equal(y[0], Y[ROWS])
    assert torch.equal(y[1], Y[ROWS] + 1)


def test_numpy_arrays_are_cut() -> None:
    labels = np.array([1, 2, 3, 4])
    _, _, y = run(X, labels)
    assert y.tolist() == [3, 1, 3]


def test_no_targets() -> None:
    assert run(X, None)[2] is None


def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"ids": X, "mask": X + 1})
    _, kwargs, y = run(encoding, encoding)
    for found in (kwargs, y):
        assert torch.equal(found["ids"], X[ROWS])
        assert torch.equal(found["mask"], X[ROWS] + 1)


@pytest.mark.parametrize("bad", [[X, X], "text", 3, None, {1, 2}])
def test_other_inputs_are_refused(bad: Any) -> None:
    with pytest.raises(BatchError, match=r"must be a tensor, a tuple .* or a dict"):
        Batch(bad, Y, squared)


@pytest.mark.parametrize(
    ("inputs", "targets"), [(X[:0], Y[:0]), (X[:0], None), (X, []), ((X[:0], 3), None)]
)
def test_an_empty_batch_is_refused(inputs: Any, targets: Any) -> None:
    with pytest.raises(BatchError, match="batch is empty"):
        Batch(inputs, targets, squared)


@pytest.mark.parametrize("inputs", [(), {}, (torch.tensor(1.0),), {"flag": True}])
def test_no_batch_axis_is_refused(inputs: Any) -> None:
    with pytest.raises(BatchError, match="no tensor with a batch axis"):
        Batch(inputs, None, squared)


@pytest.mark.parametrize("targets", [Y[:3], ["a", "b", "c"], {"a": Y[:3]}])
def test_inputs_and_targets_of_different_sizes_are_refused(targets: Any) -> None:
    with pytest.raises(BatchError, match=r"targets have 3 points.*inputs are \[4\].*Shared"):
        Batch(X, targets, squared)


def test_the_signature_knows_shapes_and_constants_but_not_the_size() -> None:
    def of(inputs: Any) -> Any:
        return Batch(inputs, None, squared).signatures()[0]

    assert of(X) == of(X[:3])
    assert of((X, ["a", "b", "c", "d"])) == of((X[:2], ["e", "f"]))
    others = [X, X.double(), X[:, :1], (X, 1), (X, 2), {"x": X}, (X, None), (X, Shared(X))]
    found = [of(x) for x in others]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_losses_are_single_precision_or_wider() -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.long, torch.float64),
    ):
        batch = Batch(X, Y, lambda outputs, targets, d=dtype: targets.to(d))
        assert batch.losses(Catch()).dtype == expected


class Named(nn.Module):
    """The same network behind every kind of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, names: Any = None) -> Tensor:
        assert names is None or len(names) == len(x)
        return torch.tanh(self.inner(x)) * scale


@pytest.mark.parametrize(
    "inputs",
    [
        (X,),
        {"x": X},
        (X, torch.ones(1, 1)),
        {"scale": Shared(torch.ones(4, 1)[:1]), "x": X},
        (X, 1.0, ["a", "b", "c", "d"]),
    ],
)
@pytest.mark.bits
def test_every_make_of_inputs_gives_the_same_gradient(inputs: Any) -> None:
    model, targets = Named(), torch.ones(4, 3)

    def gradient(inputs: Any) -> Tensor:
        model.zero_grad()
        group = Group("inner", LikelihoodRatio(), queries=4)
        ForwardGradient(model, squared, [group]).estimate(inputs, targets)
        return flat(gradients(model))

    torch.testing.assert_close(gradient(inputs), gradient(X))
