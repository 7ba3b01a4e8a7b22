"""The loss of classification by label words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.losses import TokenLoss


@dataclass(frozen=True)
class LabelWords(TokenLoss):
    """Cross-entropy over the label words' logits at the last position, as in MeZO.

        l_j = -log( exp z_j[w_y] / sum over classes c of exp z_j[w_c] ),  z_j = logits at the end

    Rows are padded on the left, so that the last position is the end of every row. ``targets`` are
    classes of shape (B,).

    Args:
        words: Token of each class: the first of its label word.
    """

    words: tuple[int, ...]

    def positions(self, targets: Any) -> Tensor:
        """The last position."""
        return torch.tensor([-1])

    def scores(self, outputs: Any) -> Tensor:
        """Logits of the label words at the last position, shape (B, classes)."""
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return logits[:, -1].index_select(1, torch.tensor(self.words, device=logits.device))

    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,)."""
        return F.cross_entropy(self.scores(outputs), targets, reduction="none")
