"""Alignment: a linear adapter from a frozen image encoder to a frozen language model.

    loss_j = -(1/T_j) sum_t log p(c_jt | instruction, W f_j + b, c_j1 .. c_j,t-1)

with the visual feature f_j of an image (computed once) and the caption's tokens c_j; only W and b
are trained. The paper's section 5.3. Likelihood ratio perturbs the adapter's output, one token of
low dimension; the language model after it is a black box.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LanguageReader(Protocol):
    """A frozen language model that reads vectors, then tokens, after a fixed instruction."""

    @property
    def width(self) -> int:
        """Size of an input embedding."""
        ...

    def embedding_scale(self) -> float:
        """Root mean square of the entries of the input embeddings."""
        ...

    def __call__(self, embeddings: Tensor, tokens: Tensor) -> Tensor:
        """Next-token logits after the embeddings and after each token, (B, 1 + T, V)."""
        ...


class AlignmentModel(nn.Module):
    """Adapter and language model; returns the loss of each caption.

    Args:
        language: The language model: a `LanguageReader`, and a module without trainable parameters.
        width: Size of a visual feature.
        tokens: Visual tokens per image.
    """

    def __init__(self, language: LanguageReader, width: int, tokens: int = 1) -> None:
        super().__init__()
        self.language = language
        # skip_init: the layer's initialisation would advance the global random state
        self.adapter = nn.utils.skip_init(nn.Linear, width, tokens * language.width)
        self.tokens = tokens

    def reset_adapter(self, features: Tensor, seed: int) -> None:
        """Initialise the adapter so that visual tokens have the mean norm of the input embeddings.

        Args:
            features: Some visual features, (N, width).
            seed: Seed of the initialisation; the global random state is left untouched.
        """
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            length = float(features.float().pow(2).sum(1).mean().sqrt())
            scale = self.language.embedding_scale() / length
            drawn = torch.randn(self.adapter.weight.shape, generator=source) * scale
            self.adapter.weight.copy_(drawn)
            self.adapter.bias.zero_()

    def forward(self, features: Tensor, captions: Tensor, mask: Tensor) -> Tensor:
        """Mean loss over the tokens of each caption, (B,).

        Args:
            features: Visual features, (B, width).
            captions: Token ids, padded at the end, (B, T).
            mask: 1 for a token of the caption and 0 for padding, (B, T).
        """
        logits = self.logits(features, captions[:, :-1])  # (B, T, V)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), captions.flatten(), reduction="none")
        mask = mask.to(losses.dtype)
        return (losses.view_as(mask) * mask).sum(1) / mask.sum(1)

    def logits(self, features: Tensor, captions: Tensor) -> Tensor:
        """Next-token logits after the visual tokens and after each caption token, (B, 1 + T, V)."""
        visual = self.adapter(features).unflatten(1, (self.tokens, -1))  # (B, tokens, E)
        return self.language(visual, captions)

    @torch.no_grad()
    def generate(self, features: Tensor, end: int, most: int = 16) -> Tensor:
        """Greedy decoding until every row has reached the end token, (B, <= most)."""
        said = torch.empty(len(features), 0, dtype=torch.long, device=features.device)
        over = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        for _ in range(most):
            following = self.logits(features, said)[:, -1].argmax(-1).masked_fill(over, end)
            said = torch.cat([said, following[:, None]], 1)
            over |= following == end
            if bool(over.all()):
                break
        return said


def identity_loss(outputs: Tensor, targets: object) -> Tensor:
    """Identity: the model returns its losses."""
    return outputs
