"""The task of texts: every objective and method, what is trained, what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flops.errors import FlopsError
from flops.passes.ranks import Ranks
from flops.tasks.models.language import load_language
from flops.tasks.text import Text, TextConfig
from flops.tasks.text.prompts import IGNORED
from flops.training.config import ConfigError
from flops.training.loop import train
from flops.training.methods import METHODS, MethodName
from flops.training.trainer import Trainer
from tests.support.covering import in_turn

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
CPU = torch.device("cpu")
SMALL = TextConfig(limit=24, batch=8, queries=2, epochs=1, plots=False)


def small(**changed: Any) -> TextConfig:
    return SMALL.replace(**changed)


def pairs(folder: Path) -> str:
    names = ["hat", "scarf", "glove", "sock", "belt", "cat", "dog", "bird", "horse", "fish"]
    rows = [{"prompt": f"describe: {n}", "completion": f" this is a {n}."} for n in names * 3]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gpt(folder: Path) -> str:
    """A model with absolute positions, tied embeddings and linear layers of its own."""
    torch.manual_seed(0)
    tokenizer = load_language().tokenizer
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=3, n_head=2, n_positions=64,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("method", "lora"), in_turn([m for m in METHODS if m != "deepzero"], [None, 2])
)
def test_every_method_trains(method: MethodName, lora: int | None) -> None:
    found = train(small(method=method, lora=lora, steps=2, queries=4))
    assert found.steps == 2
    assert found.evaluations[-1].marks == ("step 2",)
    assert found.evaluations[-1].loss != found.evaluations[0].loss


def test_validation_can_be_limited_without_the_other_splits() -> None:
    whole, some = (Text(small(validation_points=n), CPU).data for n in (None, 5))
    assert (len(some.validation), len(whole.validation)) == (5, 24)
    assert some.validation.tokens == whole.validation.tokens[:5]
    assert (len(some.train), len(some.test)) == (len(whole.train), len(whole.test))


@pytest.mark.parametrize("objective", ["words", "head", "completion"])
def test_every_objective_learns_by_backpropagation(objective: Any, tmp_path: Path) -> None:
    data = pairs(tmp_path) if objective == "completion" else "garments"
    config = small(
        data=data, objective=objective, method="bp", limit=None, epochs=None, steps=60,
        learning_rate=3e-3, batch=16,
    )  # fmt: skip
    found = train(config)
    first, last = found.evaluations[0], found.evaluations[-1]
    assert last.accuracy > max(0.95, first.accuracy)
    assert last.loss < 0.5 * first.loss


def test_forward_passes_alone_learn_the_embedded_texts() -> None:
    found = train(small(limit=None, queries=10, batch=32, epochs=2, learning_rate=3e-3))
    assert found.evaluations[0].accuracy < 0.65  # zero-shot
    assert found.accuracy > 0.85


def test_accuracy_and_loss_are_those_of_every_text_by_itself(tmp_path: Path) -> None:
    """Evaluation sorts by length, pads, leaves out logits; none of that shows."""
    for data in ("garments", pairs(tmp_path)):
        task = Text(small(data=data), CPU)
        split, right, count, losses = task.data.validation, 0, 0, []
        for row in range(len(split)):
            inputs, targets = task._batch(split, [row])
            del inputs["position_ids"]
            with torch.no_grad():
                logits = task.model(**inputs).logits
            losses.append(float(task.loss_fn(logits, targets)))
            if split.completions:
                wanted, said = targets[0, 1:], logits[0, :-1].argmax(-1)
                right += int((said == wanted)[wanted != IGNORED].sum())
                count += int((wanted != IGNORED).sum())
            else:
                right, count = (
                    right + int(task.loss_fn.scores(logits).argmax() == targets),
                    count + 1,
                )
        accuracy, loss = task.measure(split, Ranks())
        assert accuracy == right / count
        assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def trained(**changed: Any) -> set[str]:
    task = Text(small(**changed), CPU)
    return {n for n, p in task.model.named_parameters() if p.requires_grad}


def test_the_last_layers_alone_are_trained_and_queries_are_cheaper() -> None:
    found = trained(train_last=1)
    assert {n.rpartition("layers.")[2].partition(".")[0] for n in found if "layers" in n} == {"1"}
    assert {n for n in found if "layers" not in n} == {"model.norm.weight"}
    assert "score.weight" in trained(train_last=1, objective="head")
    everything = trained()
    assert {"model.embed_tokens.weight", "lm_head.weight"} < everything
    whole, last = (
        Trainer(small(train_last=last, method="lr", queries=4)).step()["forward_equivalents"]
        for last in (None, 1)
    )
    assert last < 0.5 * whole


def test_adapters_alone_are_trained() -> None:
    found = trained(lora=2)
    assert len(found) == 2 * 2 * 7  # two matrices for seven modules of two layers
    assert all("lora_" in name for name in found)
    assert len(trained(lora=2, train_last=1)) == 2 * 7
    heads = [name for name in trained(lora=2, objective="head") if "lora_" not in name]
    assert heads == ["score.modules_to_save.default.weight"]


def test_a_run_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, other = (Text(small(lora=2, seed=seed), CPU) for seed in (0, 1))
    again = Text(small(lora=2), CPU)
    assert torch.equal(before, torch.random.get_rng_state())

    def weights(task: Text) -> torch.Tensor:
        return next(p for n, p in task.model.named_parameters() if "lora_A" in n)

    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_a_full_run_is_saved_as_a_model_and_can_be_trained_further(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path / "run"))
    found = train(config)
    folder = tmp_path / "run" / "model"
    again = Text(small(model=str(folder)), CPU)
    assert again.measure(again.data.validation, Ranks()) == (
        found.accuracy,
        pytest.approx(found.evaluations[-1].loss, rel=1e-6),
    )
    head = train(small(method="bp", objective="head", output=str(tmp_path / "head")))
    kept = Text(small(model=str(tmp_path / "head" / "model"), objective="head"), CPU)
    assert kept.measure(kept.data.validation, Ranks())[0] == head.accuracy
    assert kept.model.config.id2label == {0: "garment", 1: "other"}


@pytest.mark.parametrize("objective", ["words", "head"])
def test_a_lora_run_is_saved_as_an_adapter_that_peft_loads(objective: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = small(
        lora=2, method="bp", learning_rate=1e-2, objective=objective, output=str(tmp_path / "run")
    )
    found = train(config)
    folder = tmp_path / "run" / "model"
    kept = json.loads((folder / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == "bundled"
    assert kept["r"] == 2
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("model*.safetensors"))
    task = Text(small(objective=objective), CPU)
    before = task.measure(task.data.validation, Ranks())[1]
    base = task.model
    task.model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    after = task.measure(task.data.validation, Ranks())[1]
    assert after == pytest.approx(found.evaluations[-1].loss, rel=1e-5)
    assert abs(after - before) > 1e-3


def test_a_model_with_absolute_positions_and_tied_words(tmp_path: Path) -> None:
    model = gpt(tmp_path / "gpt")
    for more in ({"train_last": 2}, {"lora": 2}, {"targets": "block"}):
        found = train(small(model=model, method="shaped-lr", queries=4, steps=2, **more))
        assert found.evaluations[-1].loss != found.evaluations[0].loss
    task = Text(small(model=model, train_last=2), CPU)
    names = {n for n, p in task.model.named_parameters() if p.requires_grad}
    assert {n.split(".")[2] for n in names if ".h." in n} == {"1", "2"}
    assert {n for n in names if ".h." not in n} == {
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    }
    text = torch.tensor([task.data.train.tokens[0]])
    inputs, _ = task.batch(torch.tensor([0]))
    with torch.no_grad():
        alone, beside = task.model(text).logits[0, -1], task.model(**inputs).logits[0, -1]
    assert torch.allclose(alone, beside, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "nobody"}, "no causal language model 'nobody': give 'bundled'"),
        ({"data": "nothing"}, "no data 'nothing': give 'garments'"),
        ({"train_last": 3}, "train_last is 3, and 'bundled' has 2 layers"),
        ({"words": ("garment=coat",)}, "label 'other' has no word"),
        ({"objective": "completion"}, "objective completion needs rows of prompt and completion"),
        ({"objective": "head", "words": ("a=b",)}, "words are for objective words, not head"),
        ({"max_tokens": 4}, "template has 4 tokens, and max_tokens is 4"),
    ],
)
def test_what_does_not_fit_is_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopsError, match=message):
        Text(small(**given), CPU)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"template": "no text"}, "template must hold {text} once, not 'no text'"),
        ({"words": ("great",)}, "words are given as name=value, not 'great'"),
        ({"columns": ("txt=a",)}, "with a name of text, label, prompt, completion, split"),
        ({"splits": ("train=a", "train=b")}, "splits name 'train' twice"),
        ({"lora_alpha": 2.0}, "lora_alpha needs lora"),
        ({"task": "image"}, "these are settings of text, and task is 'image'"),
        ({"epochs": None}, "set epochs, budget or steps: training would never end"),
        ({"steps": 0}, "steps must be greater than 0, or None"),
    ],
)
def test_wrong_settings_are_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextConfig(**given)


def test_long_texts_are_cut_and_it_is_said_once() -> None:
    with pytest.warns(UserWarning, match="48 texts were longer than 10 tokens") as seen:
        Text(small(max_tokens=10, limit=16), CPU)
    assert len(seen) == 1


def test_a_resumed_run_is_not_charged_again_for_completions_of_other_lengths(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pairs.jsonl"
    texts = ["a", "a hat", "a hat and a sock", "this is a hat", "this is a hat and a belt"]
    rows = [{"prompt": f"describe {i}:", "completion": f" {t}."} for i, t in enumerate(texts * 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small(data=str(path), method="shaped-lr", batch=2, epochs=None, steps=6)
    whole = Trainer(config)
    parts = [Trainer(config) for _ in range(2)]
    for _ in range(6):
        whole.step()
    for _ in range(3):
        parts[0].step()
    parts[1].load_state_dict(parts[0].weights(), parts[0].state_dict())
    for _ in range(3):
        parts[1].step()
    assert parts[1].progress.spent == whole.progress.spent
    for name, value in whole.weights().items():
        assert torch.equal(parts[1].weights()[name], value), name


def last_tokens(**changed: Any) -> set[int | None]:
    groups = Text(small(train_last=2, **changed), CPU).engine().groups
    return {getattr(g.estimator, "last_tokens", None) for g in groups}


def test_noise_is_on_the_last_tokens_where_it_is_told_to(tmp_path: Path) -> None:
    assert last_tokens() == {2}
    assert last_tokens(last_tokens=3) == {3}
    assert last_tokens(method="lr") == {None}
    assert last_tokens(method="lr", targets="stage") == {None}
    assert last_tokens(method="lr", targets="stage", last_tokens=5) == {5}
    lengths = Text(small(data=pairs(tmp_path)), CPU).data.train.completions
    assert last_tokens(data=pairs(tmp_path)) == {max(lengths) + 1}
