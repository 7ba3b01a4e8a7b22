"""Arguments of the Trainer that need a backward pass are refused, and others are ignored aloud."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from flops import SPSA, FlopsError, Group
from flops.allocators import Equal
from flops.integrations.model_card import section
from flops.integrations.training_arguments import accept
from flops.losses import CausalLM, LabelWords, reward
from flops.training.methods import Method
from tests.support.language import (
    arguments,
    collate,
    language_model,
    moved,
    texts,
    trainer,
    weights,
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"torch_compile": True}, "a compiled model cannot be perturbed.*leave torch_compile out"),
    ({"neftune_noise_alpha": 5.0}, "NEFTune"),
    ({"optim": "adalomo"}, "steps inside the backward pass"),
    ({"use_liger_kernel": True}, "Liger"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_needs_a_backward_pass_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    for name, value in options.items():  # some need packages that are not installed
        setattr(args, name, value)
    with pytest.raises(FlopsError, match=message):
        trainer(language_model(), args)


@pytest.mark.parametrize(
    ("name", "value"), [("deepspeed", "zero3.json"), ("fsdp", True), ("fp16", True)]
)
def test_sharded_models_and_loss_scaling_are_refused(
    name: str, value: object, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    accept(args)
    setattr(args, name, value)
    with pytest.raises(FlopsError, match=f"(?i){name}"):
        accept(args)


def test_gradient_checkpointing_is_ignored_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(tmp_path, gradient_checkpointing=True, max_steps=1)
    model = language_model()
    with caplog.at_level(logging.WARNING):
        trainer(model, args).train()
    said = [r.message for r in caplog.records if "gradient_checkpointing" in r.message]
    assert said == [
        "gradient_checkpointing is ignored: no activations are kept for a backward pass"
    ]
    assert not model.is_gradient_checkpointing
    assert args.gradient_checkpointing  # the user's arguments stay as they are


def test_dropout_is_off_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], lora_dropout=0.5)
    ours = trainer(get_peft_model(language_model(), config).train(), arguments(tmp_path))
    with caplog.at_level(logging.WARNING):
        ours.train()
    said = [r.getMessage() for r in caplog.records if "dropout" in r.getMessage()]
    assert said == ["dropout is off (2 modules): queries must differ by their noise alone"]
    assert not ours.model.training


def test_bfloat16_is_autocast_with_a_sigma_to_match(tmp_path: Path) -> None:
    ours = trainer(language_model(), arguments(tmp_path, bf16=True, max_steps=2))
    plain = trainer(language_model(), arguments(tmp_path, bf16=True), method="lr")
    assert plain.method.sigmas[0] == pytest.approx(12 * torch.finfo(torch.bfloat16).eps)
    before, seen = weights(ours.model), set()
    layer = ours.model.model.layers[0].mlp.gate_proj
    layer.register_forward_hook(lambda _, args, out: seen.add(out.dtype))
    ours.train()
    assert seen == {torch.bfloat16}
    assert moved(before, weights(ours.model)) == before.keys()
    assert all(p.dtype == torch.float32 for p in ours.model.parameters())


def test_a_model_in_half_precision(tmp_path: Path) -> None:
    ours = trainer(language_model().to(torch.bfloat16), arguments(tmp_path, max_steps=2))
    before = weights(ours.model)
    ours.train()
    assert all(found["sigma"][0] > 3e-3 for found in ours.engine.memory.values())
    assert moved(before, weights(ours.model))


def test_smoothed_labels(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    assert trainer(language_model(), args).loss == CausalLM(label_smoothing=0.1)
    with pytest.raises(FlopsError, match="smooth the labels in your own"):
        trainer(language_model(), args, loss=CausalLM())


def test_a_loss_of_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlopsError, match=r"returns one loss for the batch.*as loss="):
        trainer(language_model(), arguments(tmp_path), compute_loss_func=lambda *a, **o: None)
    with pytest.raises(FlopsError, match="no loss is known for LlamaModel"):
        trainer(language_model().model, arguments(tmp_path))


CLASHES: list[tuple[dict[str, Any], str]] = [
    ({"method": "lr", "estimator": SPSA()}, "one of method, groups and estimator"),
    ({"method": Method("lr", 4), "queries": 3}, "queries is part of the method"),
    ({"groups": [Group("model", SPSA())], "queries": 3}, "queries is part of the groups"),
    ({"estimator": SPSA(), "sigma": 0.1}, "sigma is part of the estimator"),
    ({"method": "lr", "allocator": Equal()}, "a method has its own allocator"),
]


@pytest.mark.parametrize(("options", "message"), CLASHES)
def test_options_that_contradict_each_other(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(language_model(), arguments(tmp_path), **options)


def labelled(side: str) -> Any:
    """Collates prompts padded on one side, with the class of each."""

    def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        size = max(len(item["input_ids"]) for item in items)
        ids, masks = [], []
        for item in items:
            blank, full = [0] * (size - len(item["input_ids"])), [1] * len(item["input_ids"])
            left = side == "left"
            ids.append(blank + item["input_ids"] if left else item["input_ids"] + blank)
            masks.append(blank + full if left else full + blank)
        classes = [item["input_ids"][0] % 2 for item in items]
        found = {"input_ids": ids, "attention_mask": masks, "labels": classes}
        return {name: torch.tensor(value) for name, value in found.items()}

    return collate


def test_label_words_need_padding_on_the_left(tmp_path: Path) -> None:
    loss = LabelWords((5, 6))
    for side in ("left", "right"):
        args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1)
        ours = trainer(
            language_model(),
            args,
            loss=loss,
            data_collator=labelled(side),
            eval_dataset=texts(6, seed=2),
        )
        if side == "left":
            ours.train()
            (entry,) = [e for e in ours.state.log_history if "eval_loss" in e]
            assert 0 < entry["eval_loss"] < 20
        else:
            with pytest.raises(FlopsError, match="pad on the left"):
                ours.train()


@pytest.mark.filterwarnings("ignore:.*rounding units")
def test_a_reward_is_a_loss_of_the_trainer(tmp_path: Path) -> None:
    def hits(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Share of the labelled tokens that are predicted."""
        found = outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]
        return found.float().mean(1)

    ours = trainer(language_model(), arguments(tmp_path, max_steps=3), loss=reward(hits), sigma=0.5)
    before = weights(ours.model)
    ours.train()
    assert moved(before, weights(ours.model))
    assert all(-1 <= e["loss"] <= 0 for e in ours.state.log_history if "loss" in e)


def test_the_default_arguments_are_the_trainers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ours = trainer(language_model(), None)  # type: ignore[arg-type]
    assert isinstance(ours.args, TrainingArguments)


def test_evaluation_in_half_precision_has_a_loss_in_single_precision(tmp_path: Path) -> None:
    model = language_model().to(torch.bfloat16)
    found = trainer(model, arguments(tmp_path), eval_dataset=texts())
    batch = collate(texts(3))
    loss, outputs = found.compute_loss(model, dict(batch), return_outputs=True)
    assert loss.dtype == torch.float32
    labels = batch["labels"]
    torch.testing.assert_close(loss, CausalLM()(outputs.logits.float(), labels).mean())


def test_the_decoder_reads_the_labels(tmp_path: Path) -> None:
    """Without them BART would read the source."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=79, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    found = trainer(model, arguments(tmp_path), method="mezo", queries=None)
    ids = torch.randint(4, 79, (2, 6))
    labels = torch.randint(4, 79, (2, 6))
    loss = found.compute_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss)


def test_queries_of_other_peoples_methods_are_theirs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"presets\.mezo\(model, queries=8\)"):
        trainer(language_model(), arguments(tmp_path), method="mezo", queries=50)


def test_the_card_of_backpropagation_says_so(tmp_path: Path) -> None:
    found = trainer(language_model(), arguments(tmp_path), method="bp", queries=None)
    text = section("bp", found.engine, found.totals)
    assert "those of backpropagation" in text
    assert "without a backward pass" not in text
    assert "| 20 |" not in text
