"""The adapter between two frozen models: its loss, the reused instruction, its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.errors import FlopsError
from flops.tasks.alignment.adapter import AlignmentModel, identity_loss
from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.language import PrefixLanguage
from flops.tasks.alignment.models import Language, load_encoder, load_language
from flops.tasks.alignment.task import Alignment
from flops.tasks.data.captions import (
    EXAMPLES,
    INSTRUCTION,
    TEMPLATES,
    class_captions,
    few_shot_instruction,
    noun,
)
from flops.tasks.data.fashion import CLASSES
from flops.tasks.data.images import FASHION_CLASSES
from flops.training.config import ConfigError
from flops.training.trainer import Trainer

WIDTH = 64


@pytest.fixture(scope="module")
def language() -> Language:
    return load_language()


def inputs(language: Language, rows: int = 6) -> dict[str, torch.Tensor]:
    texts = [class_captions(CLASSES, i)[i % 10] for i in range(rows)]
    tokens = [torch.tensor(language.caption(text)) for text in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "features": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)),
        "captions": pad(tokens, batch_first=True),
        "mask": pad([torch.ones(len(t)) for t in tokens], batch_first=True),
    }


def model_of(
    language: Language, instruction: str | None = INSTRUCTION, tokens: int = 1
) -> AlignmentModel:
    opening = torch.tensor([], dtype=torch.long)
    if instruction is not None:
        opening = language.prefix_tokens(instruction)
    model = AlignmentModel(PrefixLanguage(language.model, opening), WIDTH, tokens)
    model.reset_adapter(torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(2)), seed=0)
    return model.eval()


def plain_losses(
    model: AlignmentModel, given: dict[str, torch.Tensor], opening: torch.Tensor
) -> torch.Tensor:
    """Every caption by itself, without padding, cache or batch; token by token."""
    losses = []
    for feature, caption, mask in zip(*given.values(), strict=True):
        caption = caption[mask.bool()]
        visual = model.adapter(feature).view(model.tokens, -1)
        whole = torch.cat([model.language.words(opening), visual, model.language.words(caption)])
        logits = model.language.model(inputs_embeds=whole[None], use_cache=False).logits[0]
        start = len(opening) + model.tokens - 1
        steps = [F.cross_entropy(logits[start + t], token) for t, token in enumerate(caption)]
        losses.append(torch.stack(steps).mean())
    return torch.stack(losses)


@pytest.mark.parametrize(("instruction", "tokens"), [(None, 1), ("", 2), (INSTRUCTION, 1)])
def test_the_loss_is_that_of_the_plain_computation(
    language: Language, instruction: str | None, tokens: int
) -> None:
    model, given = model_of(language, instruction, tokens), inputs(language)
    opening = torch.tensor([], dtype=torch.long)
    if instruction is not None:
        opening = language.prefix_tokens(instruction)
    with torch.no_grad():
        found, wanted = model(**given), plain_losses(model, given, opening)
    assert found.shape == (6,)
    assert torch.allclose(found, wanted, atol=2e-6), (found - wanted).abs().max()
    assert (found.max() - found.min()) > 0.01  # they are not all alike


def test_a_pass_leaves_nothing_behind_for_the_next(language: Language) -> None:
    model, given = model_of(language), inputs(language)
    with torch.no_grad():
        first = model(**given)
        model(**{name: value[:2] for name, value in given.items()})
        model.generate(given["features"][:3], language.end)
        again = model(**given)
    assert torch.equal(first, again)
    lengths = {model.get_buffer(name).size(2) for name, _ in model.named_buffers() if "key" in name}
    assert lengths == {len(language.prefix_tokens(INSTRUCTION))}


def test_padding_changes_nothing_and_is_not_counted(language: Language) -> None:
    model, given = model_of(language), inputs(language)
    wider = {**given, "captions": F.pad(given["captions"], (0, 5), value=7)}
    wider["mask"] = F.pad(given["mask"], (0, 5))
    with torch.no_grad():
        assert torch.allclose(model(**wider), model(**given), atol=1e-6)


def test_the_language_model_is_frozen_and_the_adapter_is_not(language: Language) -> None:
    model = model_of(language)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == ["adapter.weight", "adapter.bias"]
    assert not any(module.training for module in model.modules())
    model(**inputs(language)).mean().backward()
    assert model.adapter.weight.grad is not None
    assert model.language.words.weight.grad is None


def test_a_fresh_adapter_speaks_as_loud_as_words(language: Language) -> None:
    model = model_of(language)
    features = torch.randn(200, WIDTH) * 3 + 1
    state = torch.random.get_rng_state()
    model.reset_adapter(features, seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    with torch.no_grad():
        loud = (
            model.adapter(features).pow(2).mean().sqrt()
            / model.language.words.weight.pow(2).mean().sqrt()
        )
    assert 0.8 < float(loud) < 1.2


def engine(model: AlignmentModel, queries: int, noise: str, sigma: float) -> ForwardGradient:
    estimator = LikelihoodRatio(sigma, "block", baseline="antithetic", noise=noise)
    groups = [Group(model.adapter, estimator, 2 * queries)]
    return ForwardGradient(model, identity_loss, groups, seed=3)


@pytest.fixture
def double(language: Language) -> AlignmentModel:
    """In double precision, where small noise shows the gradient without rounding."""
    copied = load_language()
    return model_of(Language(copied.model.double(), copied.tokenizer)).double()


def test_orthogonal_noise_is_exact_once_queries_reach_the_dimension(
    language: Language, double: AlignmentModel
) -> None:
    given = {n: v.double() if n != "captions" else v for n, v in inputs(language).items()}
    cosines = {}
    for noise in ("orthogonal", "gaussian"):
        report = engine(double, WIDTH, noise, 1e-4).estimate(given, exact=True)
        cosines[noise] = report.cosine["adapter"]
        double.zero_grad()
    assert cosines["orthogonal"] > 1 - 1e-7
    assert 0.5 < cosines["gaussian"] < 0.97


def test_noise_sits_on_the_adapter_and_a_query_costs_the_language_model(
    language: Language,
) -> None:
    config = AlignConfig(limit=20, batch=16, queries=4, epochs=1, method="ops-lr")
    trainer = Trainer(config)
    (binding,) = next(iter(trainer.fg._layouts._known.values())).bindings
    assert [site.leaf.row_shape for site in binding.sites] == [(WIDTH,)]
    line = trainer.step()
    assert line["queries"] == 4 * 16
    assert trainer.fg.allocators["adapter"].feature == "standardised"


def test_captions_have_articles_and_a_class_has_a_word_of_the_language(
    language: Language,
) -> None:
    assert noun("T-shirt/top") == "a t-shirt"
    assert noun("Ankle_boot") == "an ankle boot"
    with pytest.raises(ValueError, match="no word for a caption"):
        noun(" _ ")
    unknown = language.tokenizer.unk_token_id
    for names in (CLASSES, FASHION_CLASSES):
        for template in range(len(TEMPLATES)):
            for text in class_captions(names, template):
                assert unknown not in language.caption(text), text
    assert unknown not in language.prefix_tokens(INSTRUCTION)


def test_the_bundled_language_model_speaks_in_captions(language: Language) -> None:
    start = torch.tensor([[*language.prefix_tokens(INSTRUCTION).tolist(), *language.tokens("bag")]])
    said = language.model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=10
    )
    assert language.text(said[0, start.size(1) :]).endswith("a bag .")


def test_features_are_of_the_class_token() -> None:
    encoder = load_encoder()
    pixels = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    found = encoder.features(pixels)
    assert found.shape == (3, WIDTH)
    assert torch.equal(found, encoder.model(pixels).last_hidden_state[:, 0])


def test_a_control_has_other_images_and_the_same_captions() -> None:
    config = AlignConfig(limit=20)
    task = Alignment(config, torch.device("cpu"))
    control = Alignment(config.replace(shuffled=True), torch.device("cpu"))
    assert control.data.train.pairs.captions == task.data.train.pairs.captions
    assert not torch.equal(control.data.train.features, task.data.train.features)
    order = control.data.train.features[:, 0].argsort()
    same = task.data.train.features[:, 0].argsort()
    assert torch.equal(control.data.train.features[order], task.data.train.features[same])
    assert torch.equal(control.data.validation.features, task.data.validation.features)


def test_captions_follow_other_words_and_end_as_configured() -> None:
    language = load_language(ending=":")
    assert language.text(torch.tensor(language.caption("this is a bag.")[:-1])) == "this is a bag ."
    assert language.caption("this is a bag.")[-1] == language.end == language.tokens(":")[0]
    lines = few_shot_instruction().splitlines()
    assert lines[1] == "scarf this is a scarf."
    assert len(lines) == len(TEMPLATES)
    assert not set(EXAMPLES) & set(CLASSES)


def test_llama_cpp_wants_a_forward_method_and_a_gguf_file() -> None:
    with pytest.raises(ConfigError, match=r"llama\.cpp has no backward pass"):
        AlignConfig(engine="llama-cpp", method="bp")
    with pytest.raises(FlopsError, match=r"llama\.cpp reads GGUF files"):
        Trainer(AlignConfig(engine="llama-cpp", language="bundled"))


def test_sigma_is_found_above_the_rounding_of_llama_cpp_only() -> None:
    assert AlignConfig().recipe().sigmas == (1e-3,)
    assert AlignConfig(engine="llama-cpp").rounded
    assert not AlignConfig(engine="llama-cpp", sigma=(0.1,)).rounded
