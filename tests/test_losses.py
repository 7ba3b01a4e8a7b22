"""Losses with one value per example, and logits that are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flops import BatchError, ForwardGradient, Group, LikelihoodRatio, MeZO
from flops.losses import CausalLM
from tests.conftest import flat, gradients


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def batch() -> tuple[dict[str, Any], Tensor]:
    """Prompts of several lengths: only what follows them has labels."""
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (4, 9), generator=source)
    labels = ids.clone()
    for row, prompt in enumerate((6, 7, 5, 6)):
        labels[row, :prompt] = -100
    labels[0, 8] = -100
    return {"input_ids": ids, "use_cache": False}, labels


def plain(outputs: Any, targets: Tensor) -> Tensor:
    """The same loss, written for one row at a time."""
    rows = []
    for logits, labels in zip(outputs.logits, targets, strict=True):
        seen = [t for t in range(len(labels) - 1) if labels[t + 1] != -100]
        rows.append(torch.stack([F.cross_entropy(logits[t], labels[t + 1]) for t in seen]).mean())
    return torch.stack(rows)


def test_a_causal_language_model_has_the_mean_over_its_labelled_tokens() -> None:
    inputs, labels = batch()
    with torch.no_grad():
        outputs = model()(**inputs)
    torch.testing.assert_close(CausalLM()(outputs, labels), plain(outputs, labels))
    assert CausalLM().positions(labels).tolist() == [4, 5, 6, 7]


def test_logits_that_the_loss_does_not_read_are_not_computed() -> None:
    net, (inputs, labels) = model(), batch()
    lengths: list[int] = []
    net.lm_head.register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    found = {}
    for name, loss in (("all", plain), ("some", CausalLM())):
        net.zero_grad()
        lengths.clear()
        layers = list(net.model.layers)
        net.requires_grad_(False)
        net.model.layers.requires_grad_(True)
        groups = [Group(layers, LikelihoodRatio(targets="stage"), 4)]
        report = ForwardGradient(net, loss, groups).estimate(inputs, labels)
        found[name] = (flat(gradients(net)), report.loss, set(lengths))
    assert found["all"][2] == {9}
    assert found["some"][2] == {4}
    assert found["some"][1] == pytest.approx(found["all"][1], rel=1e-5)
    cosine = F.cosine_similarity(found["some"][0], found["all"][0], dim=0)
    assert float(cosine) > 0.999  # differences of losses over sigma, in single precision


def test_a_choice_of_the_user_is_kept() -> None:
    net, (inputs, labels) = model(), batch()
    seen: list[int] = []
    net.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    inputs["logits_to_keep"] = 0  # all of them
    ForwardGradient(net, CausalLM()).inspect(inputs, labels)
    assert set(seen) == {9}


def test_no_cache_of_keys_and_values_is_kept() -> None:
    """It grows the memory of a pass, and a layer that is computed again would extend it twice."""
    net, (inputs, labels) = model(), batch()
    del inputs["use_cache"]
    seen: list[Any] = []
    net.model.register_forward_hook(lambda *args: seen.append(args[-1].past_key_values))
    assert net(**inputs).past_key_values is not None
    seen.clear()
    ForwardGradient(net, CausalLM()).inspect(inputs, labels)
    assert seen
    assert seen.count(None) == len(seen)


def test_an_adapter_passes_the_choice_of_logits_on() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(model(), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    inputs, labels = batch()
    seen: list[int] = []
    net.get_base_model().lm_head.register_forward_hook(
        lambda _, args, out: seen.append(out.shape[1])
    )
    ForwardGradient(net.eval(), CausalLM(), Group(net, MeZO(), 2)).estimate(inputs, labels)
    assert set(seen) == {4}


def test_a_row_without_labels_is_an_error() -> None:
    inputs, labels = batch()
    labels[2] = -100
    with pytest.raises(BatchError, match=r"rows \[2\] have no label but -100"):
        ForwardGradient(model(), CausalLM()).estimate(inputs, labels)
