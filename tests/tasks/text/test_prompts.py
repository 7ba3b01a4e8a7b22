"""Prompts: templates, cuts on the left, label words, padding."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from flops.errors import BatchError
from flops.losses import CausalLM, LabelWords
from flops.tasks.models.language import Language, load_language
from flops.tasks.text.prompts import (
    IGNORED,
    Prompts,
    completion_labels,
    default_prompt,
    label_tokens,
    padded,
)


@pytest.fixture(scope="module")
def language() -> Language:
    return load_language()


def words(language: Language, tokens: list[int]) -> str:
    return " ".join(language.tokenizer.convert_ids_to_tokens(tokens))


def test_a_text_stands_in_its_template(language: Language) -> None:
    prompts = Prompts(language, "describe: {text} this is a", 64)
    said = words(language, prompts.tokens("  a photo of a hat. "))
    assert said == "<s> describe : a photo of a hat . this is a"
    assert prompts.cut == 0


def test_a_long_text_loses_its_beginning_and_the_template_nothing(language: Language) -> None:
    prompts = Prompts(language, "describe: {text} this is a", 9)
    said = words(language, prompts.tokens("a photo of a hat. a photo of a dog."))
    assert said == "<s> describe : a dog . this is a"
    prompts.tokens("a dog.")
    assert prompts.cut == 1
    with pytest.warns(UserWarning, match="1 text was longer than 9 tokens and lost the beginning"):
        prompts.warn()
    with pytest.raises(ValueError, match="template has 6 tokens, and max_tokens is 6: no room"):
        Prompts(language, "describe: {text} this is a", 6)


def test_texts_of_unknown_words_are_warned_of(language: Language) -> None:
    prompts = Prompts(language, "{text}", 64)
    prompts.tokens("a photo of a hat.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts.warn()
    prompts.pair("quarterly revenue grew", " by seven percent")
    with pytest.warns(UserWarning, match=r"4\d% of the tokens are words that .* give a --model"):
        prompts.warn()


def test_a_completion_is_whole_and_ends(language: Language) -> None:
    prompts = Prompts(language, "{text}", 8)
    tokens, length = prompts.pair("describe the picture: hat", " this is a hat.")
    assert length == 6
    assert words(language, tokens) == "<s> hat this is a hat . </s>"
    with pytest.raises(ValueError, match="has 7 tokens, and max_tokens is 8: raise it"):
        prompts.pair("hat", " here this is a hat.")


def test_label_words_are_checked(language: Language) -> None:
    template, classes = "{text} this is a", ("garment", "other")
    found = label_tokens(language, template, classes, {"garment": "coat", "other": " ball"})
    assert words(language, list(found)) == "coat ball"

    def fails(given: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            label_tokens(language, template, classes, given)

    fails({"garment": "coat"}, "label 'other' has no word: give one for each label")
    fails({"garment": "coat", "other": " "}, "label 'other' has no word")
    fails({"garment": "coat", "other": "zebra"}, "tokenizer does not know the label word 'zebra'")
    fails({"garment": "coat a", "other": "coat the"}, "'coat a' and 'coat the' begin with the same")
    fails({"garment": "coat", "others": "ball"}, "words name the label 'others', and the labels")


def test_default_words_are_of_sentiment_or_the_labels() -> None:
    assert default_prompt(("negative", "positive")) == (
        "{text} It was",
        {"negative": " terrible", "positive": " great"},
    )
    template, found = default_prompt(("sport", "science"))
    assert found == {"sport": " sport", "science": " science"}
    assert "{text}" in template
    assert default_prompt(("0", "1"))[1] == {}  # numbers are no words


def test_rows_end_together_and_no_row_is_without_padding() -> None:
    given = padded([[5, 6, 7], [8]], pad=9, width=4)
    assert given["input_ids"].tolist() == [[9, 5, 6, 7], [9, 9, 9, 8]]
    assert given["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]
    assert given["position_ids"].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    for longest, width in ((7, 8), (8, 16), (15, 16)):
        assert padded([[1] * longest], 0)["input_ids"].shape == (1, width)


def test_padding_changes_no_prediction(language: Language) -> None:
    rows = [language.tokens("a photo of a hat . this is a"), language.tokens("here you can see a")]
    with torch.no_grad():
        both = language.model(**padded(rows, 0)).logits[:, -1]
        for row, found in zip(rows, both, strict=True):
            alone = language.model(torch.tensor([row])).logits[0, -1]
            assert torch.allclose(found, alone, atol=1e-5)


def test_the_loss_of_label_words_reads_the_last_position_alone() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 20), torch.tensor([0, 1, 2, 0])
    loss = LabelWords((3, 11, 7))
    wanted = F.cross_entropy(logits[:, -1][:, [3, 11, 7]], targets, reduction="none")
    assert torch.equal(loss(logits, targets), wanted)
    assert loss.positions(targets).tolist() == [-1]
    kept = logits[:, loss.positions(targets)]
    assert torch.equal(loss(kept, targets, loss.positions(targets)), wanted)


def test_words_of_sentiment_go_by_the_name_of_the_class() -> None:
    words = {"positive": " great", "negative": " terrible"}
    assert default_prompt(("positive", "negative")) == ("{text} It was", words)
    assert default_prompt(("negative", "positive")) == ("{text} It was", words)


def test_only_the_completion_is_labelled() -> None:
    tokens = padded([[5, 6, 7], [8, 4]], pad=9, width=4)["input_ids"]
    labels = completion_labels(tokens, [2, 1])
    assert labels.tolist() == [[IGNORED, IGNORED, 6, 7], [IGNORED, IGNORED, IGNORED, 4]]
    assert CausalLM().positions(labels).tolist() == [-3, -2]
    with pytest.raises(BatchError):
        CausalLM()(torch.randn(2, 4, 10), completion_labels(tokens, [2, 1]).fill_(IGNORED))
