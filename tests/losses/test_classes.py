"""Losses of whole examples: the mean over rows is the loss of the transformers model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from flops import BatchError
from flops.losses import Classification, MultiLabel, Regression, from_model

SOURCE = torch.Generator().manual_seed(0)
IDS = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 3, 1], [2, 2, 5]])


def classifier(problem: str | None, labels: int = 3) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        problem_type=problem,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return LlamaForSequenceClassification(config).eval()


CASES: dict[str, tuple[Any, int, Tensor]] = {
    "single_label_classification": (Classification, 3, torch.tensor([0, 2, 1, 2])),
    "multi_label_classification": (
        MultiLabel,
        3,
        torch.randint(0, 2, (4, 3), generator=SOURCE).float(),
    ),
    "regression": (Regression, 1, torch.randn(4, generator=SOURCE)),
    "regression, several": (Regression, 3, torch.randn(4, 3, generator=SOURCE)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_the_loss_of_the_model(name: str) -> None:
    kind, labels, targets = CASES[name]
    model = classifier(name.partition(",")[0], labels)
    loss = from_model(model)
    assert isinstance(loss, kind)
    with torch.no_grad():
        theirs = model(input_ids=IDS, labels=targets)
        whole = loss(theirs, targets)
        assert whole.shape == (4,)
        torch.testing.assert_close(whole.mean(), theirs.loss)
        for row in range(4):  # rows do not mix
            one = loss(model(input_ids=IDS[row : row + 1]), targets[row : row + 1])
            torch.testing.assert_close(one[0], whole[row])


def test_smoothed_labels_are_those_of_the_trainer() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, targets = classifier(None), torch.tensor([0, 2, 1, 2])
    with torch.no_grad():
        outputs = model(input_ids=IDS)
    theirs = LabelSmoother(epsilon=0.2)(dict(outputs), targets[:, None])
    ours = from_model(model, label_smoothing=0.2)(outputs, targets).mean()
    torch.testing.assert_close(ours, theirs.squeeze())
    assert abs(float(ours - Classification()(outputs, targets).mean())) > 1e-3


def test_targets_of_another_kind_are_errors() -> None:
    logits = torch.randn(4, 3)
    with pytest.raises(BatchError, match="use MultiLabel"):
        Classification()(logits, torch.randn(4, 3))
    with pytest.raises(BatchError, match="CausalLM, TokenClassification or LabelWords"):
        Classification()(torch.randn(4, 5, 3), torch.tensor([0, 1, 2, 0]))
    for loss in (MultiLabel(), Regression()):
        with pytest.raises(BatchError, match=r"\(4, 3\), not \(4, "):
            loss(logits, torch.randn(4, 2))
