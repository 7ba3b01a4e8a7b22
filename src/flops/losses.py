"""Losses with one value per example, for models whose loss is a mean over tokens.

A `TokenLoss` says which positions it reads. Where the model can leave out the logits of the others
(``logits_to_keep`` of transformers), the engine lets it: for a vocabulary of 50,000 they are the
largest tensors of a pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flops.errors import BatchError


class TokenLoss(ABC):
    """A loss that reads the logits of some positions."""

    @abstractmethod
    def positions(self, targets: Any) -> Tensor:
        """Positions that the loss of any row reads, ascending, shape (K,)."""

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,).

        Args:
            outputs: Of the model; logits have shape (B, T, V), or (B, K, V) for some positions.
            targets: Of the rows.
            positions: Those of the logits; None for all.
        """


@dataclass(frozen=True)
class CausalLM(TokenLoss):
    """Mean cross-entropy of the next token, over the labelled tokens of each row.

        l_j = -1/n_j sum over t with a label of log p(y_{j,t+1} | y_{j,<=t})

    ``targets`` are labels of shape (B, T), shifted here as in transformers.

    Args:
        ignore_index: Label of tokens that are not predicted: prompt and padding.

    Raises:
        BatchError: If a row has no label.
    """

    ignore_index: int = -100

    def positions(self, targets: Any) -> Tensor:
        """Positions before a label."""
        labelled: Tensor = (targets[:, 1:] != self.ignore_index).any(0)
        return labelled.nonzero().flatten()

    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,)."""
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        labels: Tensor = targets[:, 1:]
        if positions is None:
            logits = logits[:, :-1]
        else:
            labels = labels[:, positions.to(labels.device)]
        read = labels != self.ignore_index
        empty = (~read.any(1)).nonzero().flatten()
        if len(empty):
            raise BatchError(
                f"rows {empty[:8].tolist()} have no label but {self.ignore_index}: a causal "
                "language model needs at least one token to predict, behind the first"
            )
        losses = F.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=self.ignore_index
        )
        return losses.sum(1) / read.sum(1)


__all__ = ["CausalLM", "TokenLoss"]
