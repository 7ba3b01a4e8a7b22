"""One loss per example for models with logits at every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.errors import BatchError
from flops.losses.base import TokenLoss, logits_of


@dataclass(frozen=True)
class _TokenMean(TokenLoss):
    """Mean cross-entropy over the labelled tokens of each row."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    _shift: ClassVar[int] = 0  # how far behind its logits a label stands

    def positions(self, targets: Any) -> Tensor:
        """Positions whose logits predict a label."""
        labels: Tensor = targets[:, self._shift :]
        labelled = (labels != self.ignore_index).any(0)
        return labelled.nonzero().flatten() - int(targets.size(1))

    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,)."""
        logits, length = logits_of(outputs), targets.size(1)
        labels: Tensor = targets[:, self._shift :]
        if positions is None:
            if logits.dim() != 3 or logits.size(1) < length:
                raise BatchError(
                    f"labels of {length} tokens need logits of shape (B, {length}, V), not "
                    f"{tuple(logits.shape)}"
                )
            first = logits.size(1) - length  # virtual tokens stand before the others
            logits = logits[:, first : logits.size(1) - self._shift]
        else:
            labels = targets[:, positions.to(targets.device) + self._shift]
        read = labels != self.ignore_index
        self._check(read)
        losses = F.cross_entropy(
            logits.transpose(1, 2),
            labels,
            reduction="none",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        return losses.sum(1) / read.sum(1).clamp(min=1)

    def _check(self, read: Tensor) -> None:
        """Rows without a label have the loss 0."""


@dataclass(frozen=True)
class CausalLM(_TokenMean):
    """Mean cross-entropy of the next token, over the labelled tokens of each row.

        l_j = -1/n_j sum over t with a label of log p(y_{j,t+1} | y_{j,<=t})

    ``targets`` are labels of shape (B, T), shifted here as in transformers. Every row counts alike,
    whatever its length; the loss of a transformers model is a mean over all tokens of the batch.

    Args:
        ignore_index: Label of tokens that are not predicted: prompt and padding.
        label_smoothing: Share of the target that is spread over the vocabulary.
        last: Tokens at the end of the rows that may have a label, so that all batches compute as
            many logits; None for those that have one in the batch.

    Raises:
        BatchError: If a row has no label, or one before the last tokens.
    """

    last: int | None = None
    _shift: ClassVar[int] = 1

    def positions(self, targets: Any) -> Tensor:
        """Positions whose logits predict a label."""
        found = super().positions(targets)
        if self.last is None:
            return found
        fixed = torch.arange(-min(self.last, targets.size(1) - 1) - 1, -1)
        if len(found) and int(found[0]) < int(fixed[0]):
            raise BatchError(
                f"a label stands {-1 - int(found[0])} tokens before the end, and only the last "
                f"{self.last} are read"
            )
        return fixed

    def _check(self, read: Tensor) -> None:
        empty = (~read.any(1)).nonzero().flatten()
        if len(empty):
            raise BatchError(
                f"rows {empty[:8].tolist()} have no label but {self.ignore_index}: a causal "
                "language model needs at least one token to predict, behind the first"
            )


@dataclass(frozen=True)
class MaskedLM(_TokenMean):
    """Mean cross-entropy over the masked tokens of each row.

        l_j = -1/n_j sum over masked t of log p(y_jt | the unmasked tokens)

    ``targets`` are labels of shape (B, T); a row in which chance masked nothing has the loss 0.

    Args:
        ignore_index: Label of tokens that were not masked.
        label_smoothing: Share of the target that is spread over the vocabulary.
    """


@dataclass(frozen=True)
class TokenClassification(_TokenMean):
    """Mean cross-entropy of the classes of the labelled tokens of each row.

        l_j = -1/n_j sum over t with a label of log softmax(z_jt)[y_jt]

    ``targets`` are classes of shape (B, T); a row without a label has the loss 0.

    Args:
        ignore_index: Label of tokens that have no class: padding, and parts of words.
        label_smoothing: Share of the target that is spread over all classes.
    """


@dataclass(frozen=True)
class Seq2SeqLM(_TokenMean):
    """Mean cross-entropy of the decoder's tokens, for encoder-decoder models.

        l_j = -1/n_j sum over t with a label of log p(y_jt | x_j, y_{j,<t})

    ``targets`` are labels of shape (B, T), which stand where the decoder predicts them. Inputs
    must hold ``decoder_input_ids``, as DataCollatorForSeq2Seq(tokenizer, model) adds them.

    Args:
        ignore_index: Label of padding.
        label_smoothing: Share of the target that is spread over the vocabulary.
    """


@dataclass(frozen=True)
class LabelWords(TokenLoss):
    """Cross-entropy over the words that stand for the classes, after a prompt.

        l_j = -log exp(z_j[w_{y_j}]) / sum_c exp(z_j[w_c])

    with the logits z_j at the last position: pad prompts on the left. ``targets`` are classes,
    shape (B,). The head of the language model is kept, and only one position of it is computed.

    Args:
        words: Token of each class, in their order; `of` finds them.
        label_smoothing: Share of the target that is spread over all classes.
    """

    words: tuple[int, ...]
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Validate."""
        object.__setattr__(self, "words", tuple(int(word) for word in self.words))
        if len(set(self.words)) < max(2, len(self.words)):
            raise ValueError(f"words must be two or more different tokens, not {self.words}")

    @classmethod
    def of(cls, tokenizer: Any, words: Sequence[str], label_smoothing: float = 0.0) -> Self:
        """With the tokens of some words.

        Args:
            tokenizer: Of the model.
            words: One per class, as they would stand after the prompt: often with a blank first.
            label_smoothing: As above.

        Raises:
            ValueError: If a word has several tokens.
        """
        found = [(word, tokenizer.encode(word, add_special_tokens=False)) for word in words]
        for word, tokens in found:
            if len(tokens) != 1:
                raise ValueError(
                    f"'{word}' has {len(tokens)} tokens {tokens}; label words need one token "
                    "each, so choose another word, or write it with a blank before it"
                )
        return cls(tuple(tokens[0] for _, tokens in found), label_smoothing)

    def positions(self, targets: Any) -> Tensor:
        """The last one."""
        return torch.tensor([-1])

    def scores(self, outputs: Any) -> Tensor:
        """Logits of the classes, shape (B, C); argmax predicts one."""
        last = logits_of(outputs)[:, -1]
        return last[:, torch.tensor(self.words, device=last.device)]

    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,)."""
        smooth = self.label_smoothing
        return F.cross_entropy(
            self.scores(outputs), targets, reduction="none", label_smoothing=smooth
        )
