"""`from_model`: which loss a model has; and the error for a mean over the batch names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from flops import BatchError, FlopsError, ForwardGradient
from flops.losses import (
    CausalLM,
    Classification,
    MaskedLM,
    MultiLabel,
    Regression,
    Seq2SeqLM,
    TokenClassification,
    from_model,
)

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def made(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    config = kind.config_class(**{**SMALL, **options})
    model: nn.Module = kind(config).eval()
    return model


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("LlamaForCausalLM", {}, CausalLM),
    ("GPT2LMHeadModel", {"n_embd": 8, "n_layer": 1, "n_head": 2}, CausalLM),
    ("BertForMaskedLM", {}, MaskedLM),
    ("BertForTokenClassification", {}, TokenClassification),
    ("BertForSequenceClassification", {"num_labels": 3}, Classification),
    ("BertForSequenceClassification", {"num_labels": 1}, Regression),
    ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, MultiLabel),
    ("ViTForImageClassification", {"image_size": 8, "patch_size": 4}, Classification),
    (
        "T5ForConditionalGeneration",
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        Seq2SeqLM,
    ),
]


@pytest.mark.parametrize(("name", "options", "kind"), CASES)
def test_the_loss_of_a_model(name: str, options: dict[str, Any], kind: type) -> None:
    assert type(from_model(made(name, **options))) is kind


def test_an_unknown_model_needs_a_loss() -> None:
    with pytest.raises(FlopsError, match="no loss is known for Linear; give a function"):
        from_model(nn.Linear(2, 2))


def test_labels_of_a_regression_are_not_smoothed() -> None:
    model = made("BertForSequenceClassification", num_labels=1)
    with pytest.raises(FlopsError, match="Regression cannot be smoothed"):
        from_model(model, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("name", "right"), [("LlamaForCausalLM", "CausalLM"), ("BertForMaskedLM", "MaskedLM")]
)
def test_a_mean_over_the_batch_is_an_error_that_names_the_right_loss(name: str, right: str) -> None:
    model, ids = made(name), torch.randint(1, 11, (4, 5))
    fg = ForwardGradient(model, lambda outputs, targets: outputs.loss)
    with pytest.raises(BatchError, match=rf"a mean over the batch.*{name} use .*{right}\(\)"):
        fg.estimate({"input_ids": ids, "labels": ids})
    plain = ForwardGradient(nn.Linear(3, 2), lambda outputs, targets: outputs.mean())
    with pytest.raises(BatchError, match=r'a mean over the batch.*reduction="none"'):
        plain.estimate(torch.randn(4, 3), torch.randn(4, 2))
