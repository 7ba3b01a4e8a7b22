"""Adapters of PEFT: only they train, by every way of estimating, and PEFT loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from flops import SPSA, CoverageError, ForwardGradient, Group, LikelihoodRatio, MeZO
from flops.integrations.peft import prompts_by_row
from flops.losses import CausalLM, Classification, from_model
from tests.conftest import flat, gradients
from tests.support.covering import in_turn
from tests.support.language import (
    arguments,
    collate,
    language_model,
    moved,
    same,
    texts,
    trainer,
    weights,
)

TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
VIRTUAL: dict[str, Any] = {**TASK, "num_virtual_tokens": 3}
IA3: dict[str, Any] = {
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
CONFIGS = {
    "lora": lambda: LoraConfig(**TASK, **LORA),
    "ia3": lambda: IA3Config(**TASK, **IA3),
    "prompt": lambda: PromptTuningConfig(**VIRTUAL),
    "prefix": lambda: PrefixTuningConfig(**VIRTUAL),
    "prefix, projected": lambda: PrefixTuningConfig(
        **VIRTUAL, prefix_projection=True, encoder_hidden_size=8
    ),
    "p-tuning": lambda: PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=8),
}
GROUPS = {
    "lora": {f"blocks-{i + 1}": [f"base_model.model.model.layers.{i}"] for i in range(2)},
    "ia3": {f"blocks-{i + 1}": [f"base_model.model.model.layers.{i}"] for i in range(2)},
    "prompt": {"blocks-1": ["prompt_encoder.default.embedding"]},
    "prefix": {"blocks-1": ["prompt_encoder.default.embedding"]},
    "prefix, projected": {"blocks-1": ["prompt_encoder.default"]},
    "p-tuning": {"blocks-1": ["prompt_encoder.default"]},
}


def adapted(name: str) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(language_model(), CONFIGS[name]()).eval()
    source = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # zeros at first, which hide the gradients of lora_A
            parameter.data.normal_(0, 0.1, generator=source)
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    inputs = collate(texts(4))
    return inputs, inputs.pop("labels")


@pytest.mark.parametrize("name", CONFIGS)
def test_automatic_groups(name: str) -> None:
    fg = ForwardGradient(adapted(name), CausalLM())
    assert {group.name: list(group.modules) for group in fg.groups} == GROUPS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_likelihood_ratio_estimates_the_gradient_of_the_adapters(name: str) -> None:
    model, (inputs, labels) = adapted(name), batch()
    fg = ForwardGradient(model, CausalLM(), None, seed=1)
    several = [
        Group(list(g.modules), LikelihoodRatio(1e-3, targets="stage"), 1500, name=g.name)
        for g in fg.groups
    ]
    with prompts_by_row(model):
        fg = ForwardGradient(model, CausalLM(), several)
        report = fg.estimate(inputs, labels, exact=True)
    assert min(report.cosine.values()) > 0.75, report.cosine
    found = gradients(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == trained
    # Backpropagation through the stock model, whose prompt is computed once for all rows.
    model.zero_grad()
    from_model(model)(model(**inputs), labels).mean().backward()
    cosine = torch.cosine_similarity(flat(found), flat(gradients(model)), dim=0)
    assert float(cosine) > 0.75


@pytest.mark.parametrize(
    ("name", "estimator"),
    in_turn(CONFIGS, [SPSA(), SPSA(shared=True), MeZO(), LikelihoodRatio(targets="leaf")], step=2),
    ids=str,
)
def test_other_estimators_perturb_the_adapters(name: str, estimator: Any) -> None:
    model, (inputs, labels) = adapted(name), batch()
    before = weights(model)
    targets = [m for members in GROUPS[name].values() for m in members]
    with prompts_by_row(model):
        fg = ForwardGradient(model, CausalLM(), [Group(targets, estimator, 4)])
        fg.estimate(inputs, labels)
    assert set(gradients(model)) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert same(before, weights(model))


def test_a_prompt_that_is_computed_once_cannot_be_perturbed_by_row() -> None:
    model, (inputs, labels) = adapted("prompt"), batch()
    fg = ForwardGradient(model, CausalLM())
    with pytest.raises(CoverageError, match=r"no batch axis.*use SPSA\(shared=True\)"):
        fg.estimate(inputs, labels)


@pytest.mark.parametrize("name", ["prompt", "p-tuning", "prefix", "lora"])
def test_prompts_by_row_change_no_output(name: str) -> None:
    model, (inputs, _) = adapted(name), batch()
    with torch.no_grad():
        plain = model(**inputs).logits
        with prompts_by_row(model):
            by_row = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, plain)
    torch.testing.assert_close(by_row, plain)
    assert "get_prompt" not in vars(model)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.bits if n == "lora" else ()) for n in CONFIGS]
)
def test_the_trainer_trains_only_the_adapter_and_peft_loads_it(name: str, tmp_path: Path) -> None:
    ours = trainer(adapted(name), arguments(tmp_path))
    before = weights(ours.model)
    ours.train()
    changed = moved(before, weights(ours.model))
    assert changed == {n for n, p in ours.model.named_parameters() if p.requires_grad}
    ours.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(language_model(), tmp_path).eval()
    inputs, _ = batch()
    with torch.no_grad():
        found, wanted = loaded(**inputs).logits, ours.model.eval()(**inputs).logits
    if name in ("p-tuning", "prefix, projected"):  # PEFT computes the prompt once, and saves it
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", [pytest.param("lora", marks=pytest.mark.bits), "p-tuning"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = trainer(adapted(name), arguments(tmp_path / "whole", **options))
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            control.should_training_stop = state.global_step == 3

    cut = trainer(adapted(name), arguments(tmp_path / "cut", **options), callbacks=[Stop()])
    cut.train()
    resumed = trainer(adapted(name), arguments(tmp_path / "cut", **options))
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed.model), weights(whole.model))
    assert not same(weights(cut.model), weights(whole.model))


def test_logits_that_the_loss_does_not_read_are_not_computed() -> None:
    for name in ("lora", "prompt"):
        model, (inputs, labels) = adapted(name), batch()
        head = model.get_base_model().lm_head
        seen: list[int] = []
        head.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
        fg = ForwardGradient(
            model, CausalLM(), Group(list(model.parameters())[:0] or model, MeZO(), 2)
        )
        fg.estimate(inputs, labels)
        assert set(seen) == {len(CausalLM().positions(labels))}


class Int8Linear(nn.Linear):
    """A frozen weight of integers with a scale, as quantised models have."""

    def quantise(self) -> None:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        integers = (self.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)  # type: ignore[arg-type]


def test_a_quantised_base_with_lora(tmp_path: Path) -> None:
    base = language_model()
    for module in base.modules():
        if isinstance(module, nn.Linear) and module is not base.lm_head:
            module.__class__ = Int8Linear
            module.quantise()
    model = get_peft_model(base, LoraConfig(**TASK, **LORA))
    ours = trainer(model, arguments(tmp_path))
    before = weights(ours.model)
    ours.train()
    changed = moved(before, weights(ours.model))
    assert changed
    assert all("lora_" in name for name in changed)
    assert sum(p.dtype == torch.int8 for p in model.parameters()) == 14


def test_a_classifier_with_a_trained_prompt_and_head(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=79,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
        pad_token_id=0,
        initializer_range=0.5,
    )
    options = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
    model = get_peft_model(LlamaForSequenceClassification(config), PromptTuningConfig(**options))
    data = [{"input_ids": text["input_ids"][:4], "labels": i % 3} for i, text in enumerate(texts())]
    ours = trainer(model, arguments(tmp_path), train_dataset=data, data_collator=None)
    before = weights(ours.model)
    ours.train()
    assert isinstance(ours.loss, Classification)
    trained = {n for n, p in ours.model.named_parameters() if p.requires_grad}
    assert moved(before, weights(ours.model)) == trained
    assert any("score" in name for name in trained)
    assert any("prompt_encoder" in name for name in trained)
