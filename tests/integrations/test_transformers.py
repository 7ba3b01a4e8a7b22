"""`ForwardTrainer` is the plain loop, with accumulation and after a restart, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, get_linear_schedule_with_warmup

from flops import SPSA, Exact, FlopsError, ForwardGradient, Group, LikelihoodRatio
from flops.allocators import Neyman
from flops.integrations.transformers import STATE, ForwardTrainer
from flops.losses import CausalLM
from flops.training.methods import Method, engine
from tests.conftest import flat, gradients
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


def plain_loop(model: nn.Module, order: list[list[list[int]]], method: Method) -> list[float]:
    """What ForwardTrainer should do, written out: rows of micro-batches by step."""
    data = texts()
    fg = engine(model, CausalLM(), method, seed=7, feature="standardised")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(order))
    losses = []
    for step in order:
        total, loss = sum(map(len, step)), 0.0
        for rows in step:
            batch = collate([data[row] for row in rows])
            labels = batch.pop("labels")
            share = len(rows) / total
            report = fg.estimate(batch, labels, index=rows, scale=share)
            loss += report.loss * share
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


class Order(TrainerCallback):
    """Rows of the micro-batches of each step, as the engine saw them."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = [[]]

    def watch(self, trainer: ForwardTrainer) -> None:
        inner = trainer.engine.estimate

        def estimate(inputs: Any, targets: Any, **options: Any) -> Any:
            self.steps[-1].append(options["index"].tolist())
            return inner(inputs, targets, **options)

        trainer.engine.estimate = estimate  # type: ignore[method-assign]

    def on_step_end(self, *args: Any, **options: Any) -> None:
        self.steps.append([])


@pytest.mark.parametrize(
    ("batch", "accumulate"),
    [
        (3, 1),
        pytest.param(5, 2, marks=pytest.mark.bits),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((5, 1), (2, 2))),
    ],
)
def test_training_is_the_plain_loop(tmp_path: Path, batch: int, accumulate: int) -> None:
    order = Order()
    options = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": batch}
    ours = trainer(language_model(), arguments(tmp_path, **options), callbacks=[order])
    start = weights(ours.model)

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            order.watch(ours)

    ours.add_callback(Watch())
    ours.train()
    steps = [step for step in order.steps if step]
    sizes = [[len(rows) for rows in step] for step in steps]
    assert sizes[0] == [batch] * accumulate
    assert sorted(row for step in steps for rows in step for row in rows) == sorted(
        [*range(12)] * 2
    )
    assert len({tuple(map(tuple, step)) for step in steps}) == len(steps)  # shuffled
    other = language_model()
    losses = plain_loop(other, steps, Method("shaped-lr", 4))
    assert same(weights(ours.model), weights(other))
    assert not same(weights(ours.model), start)
    logged = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)


def test_micro_batches_add_up_to_the_gradient_of_the_batch(tmp_path: Path) -> None:
    found = []
    for batch, accumulate in ((5, 1), (2, 3)):  # 2 + 2 + 1 of five points
        args = arguments(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            max_steps=1,
        )
        model = language_model()
        groups = [Group(model, Exact(), name="all")]
        one = trainer(model, args, groups=groups, train_dataset=texts(5))
        seen: list[Tensor] = []

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
                seen.append(flat(gradients(model)))

        one.add_callback(Watch())
        one.train()
        found.append(seen[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.bits
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, accumulate: int) -> None:
    options = {"gradient_accumulation_steps": accumulate, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(language_model(), arguments(tmp_path / "whole", **options))
    whole.train()
    stopped = trainer(language_model(), arguments(tmp_path / "cut", **options))

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            control.should_training_stop = state.global_step == 2

    stopped.add_callback(Stop())
    stopped.train()
    at_stop = weights(stopped.model)
    resumed = trainer(language_model(), arguments(tmp_path / "cut", **options))
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed.model), weights(whole.model))
    assert not same(weights(resumed.model), at_stop)
    assert resumed.engine.steps == whole.engine.steps
    assert resumed.totals.queries == whole.totals.queries
    a, b = resumed.engine.state_dict(), whole.engine.state_dict()
    assert str(a["allocators"]) == str(b["allocators"])
    assert str(a["memory"]) == str(b["memory"])


def test_a_checkpoint_without_engine_state_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    first = trainer(language_model(), arguments(tmp_path, **options))
    first.train()
    for number, message in ((1, "cannot be read"), (2, f"has no {STATE}")):
        folder = tmp_path / f"checkpoint-{number}"
        (folder / STATE).write_bytes(b"damaged") if number == 1 else (folder / STATE).unlink()
        again = trainer(language_model(), arguments(tmp_path, **options))
        with pytest.raises(FlopsError, match=message):
            again.train(resume_from_checkpoint=str(folder))


def test_logs_have_queries_costs_and_statistics_of_the_groups(tmp_path: Path) -> None:
    ours = trainer(language_model(), arguments(tmp_path, max_steps=4), sigma=1e-3)
    output = ours.train()
    first, *_, last, final = ours.state.log_history
    groups = [group.name for group in ours.engine.groups]
    assert first["queries"] == 3 * 4 * len(groups)
    assert last["queries"] == final["queries"] == output.metrics["queries"] == 4 * first["queries"]
    assert last["forward_equivalents"] == pytest.approx(sum(ours.totals.parts.values()))
    assert ours.totals.parts["clean"] == 12.0
    assert {f"snr/{name}" for name in groups} <= last.keys()
    assert any(name.startswith("explained_variance/") for name in last)
    json.dumps(ours.state.log_history)


def test_sigma_is_searched_for_in_the_first_step_and_charged(tmp_path: Path) -> None:
    ours = trainer(language_model(), arguments(tmp_path, max_steps=2))
    ours.train()
    first, second, *_ = ours.state.log_history
    groups = [group.name for group in ours.engine.groups]
    assert first["queries"] > 3 * 4 * len(groups)
    assert second["queries"] - first["queries"] == 3 * 4 * len(groups)
    assert all(ours.engine.memory[name]["sigma"][0] > 0 for name in groups)


def test_floating_point_operations_are_those_of_the_passes(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, train_sampling_strategy="sequential")
    ours = trainer(language_model(), args)
    ours.train()
    tokens = collate(texts()[:3])["input_ids"].numel()
    passes = ours.totals.forward_equivalents / 3  # of the whole batch
    one = 2 * tokens * ours.model.num_parameters(exclude_embeddings=True)
    assert ours.state.total_flos == pytest.approx(one * passes, rel=1e-6)


def test_evaluation_has_the_loss_of_training(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="epoch", per_device_eval_batch_size=12)
    ours = trainer(
        language_model(),
        args,
        eval_dataset=texts(12, seed=1),
        compute_metrics=lambda found: {"tokens": found.predictions.shape[1]},
    )
    ours.train()
    entries = [entry for entry in ours.state.log_history if "eval_loss" in entry]
    assert len(entries) == 2
    batch = collate(texts(12, seed=1))
    labels = batch.pop("labels")
    with torch.no_grad():
        wanted = CausalLM()(ours.model(**batch), labels).mean()
    assert entries[-1]["eval_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert entries[-1]["eval_tokens"] == labels.size(1)


def test_groups_estimators_and_allocators_of_the_user(tmp_path: Path) -> None:
    def layers(model: nn.Module) -> list[Group]:
        model.requires_grad_(False)
        model.get_submodule("model.layers").requires_grad_(True)
        return [Group("model.layers.*", LikelihoodRatio(targets="stage"), 4, name="layers")]

    ours = trainer(
        language_model(), arguments(tmp_path, max_steps=2), groups=layers, allocator=Neyman()
    )
    start = weights(ours.model)
    ours.train()
    changed = moved(start, weights(ours.model))
    assert changed
    assert all(name.startswith("model.layers.") for name in changed)
    assert isinstance(ours.engine.allocators["layers"], Neyman)
    other = trainer(language_model(), arguments(tmp_path, max_steps=1), estimator=SPSA(shared=True))
    assert {type(group.estimator) for group in other.engine.groups} == {SPSA}
    assert {group.queries for group in other.engine.groups} == {4}


def test_a_new_model_for_every_run(tmp_path: Path) -> None:
    ours = ForwardTrainer(
        args=arguments(tmp_path, max_steps=2),
        model_init=language_model,
        train_dataset=texts(),
        data_collator=collate,
        method="mezo",
    )
    ours.train()
    first = weights(ours.model)
    ours.train()
    assert same(weights(ours.model), first)
    assert isinstance(ours.engine, ForwardGradient)


def test_the_model_card_names_method_queries_and_cost(tmp_path: Path) -> None:
    ours = trainer(language_model(), arguments(tmp_path, max_steps=1))
    ours.model.config.name_or_path = ""
    ours.train()
    ours.save_model()
    ours.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "method `shaped-lr`, seed 7" in card
    assert f"- Queries: {ours.totals.queries:,}" in card
    assert "| blocks-1 | LikelihoodRatio |" in card
    assert f"{ours.totals.forward_equivalents:,.0f} forward passes" in card
    ours.create_model_card()
    assert (tmp_path / "README.md").read_text().count("## Forward-only training") == 1
