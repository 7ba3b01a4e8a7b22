"""Prompts: a text in a template, label words, and rows of tokens padded on the left.

With padding on the left the last position is the end of every row, and positions of the rows are
aligned at their end, where the prediction is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flops.tasks.models.language import Language

TEXT = "{text}"
SENTIMENT = "{text} It was"
PLAIN = "{text}\nLabel:"
GOOD, BAD = ("1", "positive", "pos"), ("0", "negative", "neg")
UNREADABLE = 0.2  # share of unknown tokens from which texts are probably for another model
MULTIPLE = 8  # widths of batches are multiples of it, so that few lengths occur
IGNORED = -100


@dataclass
class Prompts:
    """Turns texts into tokens, at most `most` of them; longer texts lose their beginning.

    Args:
        language: Tokenizer.
        template: Text with {text} in it once.
        most: Largest number of tokens.

    Raises:
        ValueError: The template alone is too long.
    """

    language: Language
    template: str
    most: int
    cut: int = field(default=0, init=False)  # texts that were too long
    seen: int = field(default=0, init=False)  # tokens
    unknown: int = field(default=0, init=False)  # tokens that stand for any other text

    def __post_init__(self) -> None:
        """Tokenise the template."""
        before, _, self._after = self.template.partition(TEXT)
        self._before = self.language.prefix_tokens(before.rstrip(" ")).tolist()
        # The space belongs to the first word of the text, as tokenizers see it.
        self._space = " " if before.endswith(" ") else ""
        fixed = len(self._before) + len(self.language.tokens(self._after))
        if fixed >= self.most:
            raise ValueError(
                f"the template has {fixed} tokens, and max_tokens is {self.most}: no room is left "
                "for the text"
            )

    def tokens(self, text: str) -> list[int]:
        """Tokens of the prompt of a text."""
        found = self.language.tokens(f"{self._space}{text.strip()}{self._after}")
        return self._within(self._before, found)

    def pair(self, text: str, completion: str) -> tuple[list[int], int]:
        """Tokens of prompt, completion and end, and how many of them are the completion.

        Raises:
            ValueError: The completion alone is too long.
        """
        prompt = self.language.tokens(f"{self._space}{text.strip()}{self._after}")
        whole = self.language.tokens(f"{self._space}{text.strip()}{self._after}{completion}")
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
        else:  # the tokenizer merges the end of the one with the beginning of the other
            answer = self.language.tokens(completion)
        answer = [*answer, self.language.end]
        if len(self._before) + len(answer) >= self.most:
            raise ValueError(
                f"the completion {completion[:40]!r} has {len(answer)} tokens, and max_tokens is "
                f"{self.most}: raise it, or shorten the completion"
            )
        return self._within(self._before, [*prompt, *answer]), len(answer)

    def _within(self, before: list[int], found: list[int]) -> list[int]:
        room = self.most - len(before)
        self.seen += len(found)
        unknown = self.language.tokenizer.unk_token_id
        if unknown != self.language.end:  # one token for both tells nothing
            self.unknown += found.count(unknown)
        if len(found) > room:
            self.cut += 1
            found = found[-room:]
        return [*before, *found]

    def warn(self) -> None:
        """Say, once, how many texts were too long, and how much of them cannot be read."""
        if self.unknown > UNREADABLE * self.seen:
            warnings.warn(
                f"{self.unknown / self.seen:.0%} of the tokens are words that the model's "
                "tokenizer does not know, so all of them look alike: give a --model for these "
                "texts (the bundled one knows its own only)",
                stacklevel=3,
            )
        if self.cut:
            some = "1 text was" if self.cut == 1 else f"{self.cut:,} texts were"
            warnings.warn(
                f"{some} longer than {self.most} tokens and lost the beginning; max_tokens keeps "
                "more",
                stacklevel=3,
            )


def label_tokens(
    language: Language, template: str, classes: Sequence[str], words: Mapping[str, str]
) -> tuple[int, ...]:
    """The first token of each class's label word, as it continues the template.

    Raises:
        ValueError: A class has no word, a word is unknown to the tokenizer, or two words begin with
            the same token.
    """
    if other := sorted(set(words) - set(classes)):
        raise ValueError(
            f"words name the label {other[0]!r}, and the labels are {', '.join(classes)}"
        )
    context = template.partition(TEXT)[2] or "."
    before = language.tokens(context)
    found: dict[int, str] = {}
    for name in classes:
        if not words.get(name, "").strip():
            raise ValueError(
                f"the label {name!r} has no word: give one for each label with `words`, such as "
                f"'{classes[0]}= terrible' '{classes[-1]}= great'"
            )
        whole = language.tokens(context + words[name])
        tokens = whole[len(before) :] if whole[: len(before)] == before else []
        tokens = tokens or language.tokens(words[name])
        first = tokens[0] if tokens else language.tokenizer.unk_token_id
        if first is None or first == language.tokenizer.unk_token_id:
            raise ValueError(
                f"the tokenizer does not know the label word {words[name]!r}: give another --model "
                "(the bundled one knows its own texts only), other --words, or --objective head"
            )
        if first in found:
            raise ValueError(
                f"the label words {found[first]!r} and {words[name]!r} begin with the same token: "
                "choose words that differ in their first token"
            )
        found[first] = words[name]
    return tuple(found)


def default_prompt(classes: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Template and label words for labels of any data: of sentiment, or the labels themselves.

    Numbers are no words, so that they must be given some.
    """
    words = {name: " great" for name in classes if name.lower() in GOOD[1:]}
    words |= {name: " terrible" for name in classes if name.lower() in BAD[1:]}
    if len(classes) == 2 and sorted(words.values()) == [" great", " terrible"]:
        return SENTIMENT, words
    return PLAIN, {name: f" {name}" for name in classes if not name.lstrip("-").isdigit()}


def padded(rows: Sequence[Sequence[int]], pad: int, width: int | None = None) -> dict[str, Tensor]:
    """Rows of tokens, padded on the left to a common width, with the inputs of a model.

    At least one position of every row is padding: without any, transformers drops the mask and
    takes another kernel, and a row would be rounded differently in another batch.

    Args:
        rows: Tokens of each row.
        pad: Token of the padding.
        width: Width, more than that of any row; None for the least multiple of 8.
    """
    size = width or -(-(1 + max(map(len, rows))) // MULTIPLE) * MULTIPLE
    tokens = torch.full((len(rows), size), pad)
    mask = torch.zeros(len(rows), size, dtype=torch.long)
    for place, row in enumerate(rows):
        tokens[place, size - len(row) :] = torch.tensor(row)
        mask[place, size - len(row) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def completion_labels(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Labels of a causal language model: the completion at the end of each row, nothing else."""
    labels = torch.full_like(tokens, IGNORED)
    for place, length in enumerate(lengths):
        labels[place, -length:] = tokens[place, -length:]
    return labels
