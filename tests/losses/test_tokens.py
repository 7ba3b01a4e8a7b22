"""Losses with one value per example, and logits that are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flops import BatchError, Exact, ForwardGradient, Group, LikelihoodRatio, MeZO
from flops.losses import CausalLM, LabelWords, MaskedLM, TokenClassification
from tests.conftest import flat, gradients, squared


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
    assert CausalLM().positions(labels).tolist() == [-5, -4, -3, -2]


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


def test_masked_and_token_losses_are_means_over_the_labelled_tokens_of_a_row() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 1:] = labels[1, 2] = labels[2] = -100
    for loss in (MaskedLM(), TokenClassification()):
        found = loss(logits, labels)
        assert float(found[0]) == pytest.approx(
            float(F.cross_entropy(logits[0, :1], labels[0, :1]))
        )
        rest = labels[1] != -100
        wanted = F.cross_entropy(logits[1, rest], labels[1, rest])
        assert float(found[1]) == pytest.approx(float(wanted))
        assert float(found[2]) == 0  # chance masked nothing
        assert loss.positions(labels[:2]).tolist() == [-5, -4, -2, -1]
        assert loss.positions(labels[:1]).tolist() == [-5]
        torch.testing.assert_close(loss(logits[:1, :1], labels[:1], torch.tensor([-5])), found[:1])


def test_virtual_tokens_before_the_others_are_not_read() -> None:
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    longer = torch.cat([torch.randn(3, 2, 7), logits], 1)
    for loss in (CausalLM(), MaskedLM()):
        assert torch.equal(loss(longer, labels), loss(logits, labels))
    with pytest.raises(BatchError, match=r"labels of 5 tokens need logits of shape \(B, 5, V\)"):
        CausalLM()(logits[:, :3], labels)


def test_label_words_compare_a_few_tokens_at_the_last_position() -> None:
    net, loss = model(), LabelWords((4, 9, 2))
    ids, classes = torch.randint(0, 31, (4, 6)), torch.tensor([0, 2, 1, 1])
    seen: list[int] = []
    net.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    report = ForwardGradient(net, loss, [Group(net, Exact())]).estimate({"input_ids": ids}, classes)
    assert set(seen) == {1}
    with torch.no_grad():
        last = net(input_ids=ids).logits[:, -1]
    wanted = F.cross_entropy(last[:, [4, 9, 2]], classes)
    assert report.loss == pytest.approx(float(wanted), rel=1e-5)
    assert torch.equal(loss.scores(net(input_ids=ids)), last[:, [4, 9, 2]])


def test_padding_on_the_left_changes_nothing() -> None:
    net, loss, ids = model(), LabelWords((4, 9)), torch.randint(3, 31, (2, 5))
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    classes = torch.tensor([0, 1])
    with torch.no_grad():
        plain = loss(net(input_ids=ids), classes)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        other = net(input_ids=padded, attention_mask=mask, position_ids=places)
    torch.testing.assert_close(loss(other, classes), plain)


class Tokenizer:
    """One token for each word it knows, two for the others."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {" good": [4], " bad": [9]}.get(text, [1, 2])


def test_label_words_are_single_tokens() -> None:
    assert LabelWords.of(Tokenizer(), [" good", " bad"]).words == (4, 9)
    with pytest.raises(ValueError, match=r"'terrible' has 2 tokens.*choose another word"):
        LabelWords.of(Tokenizer(), [" good", "terrible"])
    with pytest.raises(ValueError, match="two or more different tokens"):
        LabelWords((4, 4))


def test_all_batches_may_compute_as_many_logits() -> None:
    _, labels = batch()
    assert CausalLM(last=6).positions(labels).tolist() == [-7, -6, -5, -4, -3, -2]
    assert CausalLM(last=99).positions(labels).tolist() == list(range(-9, -1))
    with pytest.raises(BatchError, match="4 tokens before the end, and only the last 3"):
        CausalLM(last=3).positions(labels)
    net, inputs = model(), batch()[0]
    with torch.no_grad():
        outputs = net(**inputs)
        some = net(**inputs, logits_to_keep=CausalLM(last=6).positions(labels))
    found = CausalLM(last=6)(some, labels, CausalLM(last=6).positions(labels))
    torch.testing.assert_close(found, plain(outputs, labels))


def test_labels_that_are_missing_are_named() -> None:
    inputs, _ = batch()
    with pytest.raises(BatchError, match="CausalLM needs labels, and there are none"):
        ForwardGradient(model(), CausalLM()).estimate(inputs, None)


class Own(nn.Module):
    """A model whose argument happens to have a name of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        return self.layer(x) if use_cache else self.layer(x) + 100


def test_arguments_of_other_models_are_left_alone() -> None:
    net, x, y = Own().double(), torch.randn(4, 3).double(), torch.randn(4, 2).double()
    fg = ForwardGradient(net, squared, Group(net, MeZO(), 2))
    assert fg.estimate(x, y).loss == pytest.approx(squared(net(x), y).mean().item(), rel=1e-2)
    assert fg.estimate((x, False), y).loss > 1000
    llama, (inputs, labels) = model(), batch()
    by_position = (inputs["input_ids"], None, None, None, None, None, False)
    ForwardGradient(llama, CausalLM(), Group(llama, MeZO(), 2)).estimate(by_position, labels)


def test_label_words_name_every_class() -> None:
    class Letters:
        def encode(self, word: str, add_special_tokens: bool) -> list[int]:
            return [ord(c) for c in word]

    assert LabelWords.of(Letters(), ["x", "y"]).words == (120, 121)
    with pytest.raises(ValueError, match="different tokens"):
        LabelWords.of(Letters(), ["x", "y", "x"])
