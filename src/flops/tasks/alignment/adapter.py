"""Alignment: a linear adapter from a frozen image encoder to a frozen language model.

    loss_j = -(1/T_j) sum_t log p(c_jt | instruction, W f_j + b, c_j1 .. c_j,t-1)

with the visual feature f_j of an image (computed once) and the caption's tokens c_j; only W and b
are trained. The paper's section 5.3. Likelihood ratio perturbs the adapter's output, one token of
low dimension; the language model after it is a black box.

The instruction's keys and values are the same for all rows and passes, so they are computed once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.optional import require


class AlignmentModel(nn.Module):
    """Adapter and language model; returns the loss of each caption.

    Args:
        language: A causal language model of transformers; it is frozen, in evaluation mode.
        width: Size of a visual feature.
        instruction: Tokens before the visual ones, (P,); may be empty.
        tokens: Visual tokens per image.
    """

    def __init__(
        self, language: nn.Module, width: int, instruction: Tensor, tokens: int = 1
    ) -> None:
        super().__init__()
        self.language: Any = language.eval()
        self.language.requires_grad_(False)
        size = self.words.weight.size(1)
        # skip_init: the layer's initialisation would advance the global random state
        self.adapter = nn.utils.skip_init(nn.Linear, width, tokens * size)
        self.tokens = tokens
        self._depth = 0
        if len(instruction):
            self._cache_instruction(instruction)

    @property
    def words(self) -> nn.Embedding:
        """The language model's input embeddings."""
        found: nn.Embedding = self.language.get_input_embeddings()
        return found

    def _cache_instruction(self, instruction: Tensor) -> None:
        """Store keys and values of the instruction as buffers, so that they move with the model."""
        with torch.no_grad():
            past = self.language(instruction[None], use_cache=True).past_key_values
        for depth, layer in enumerate(past.layers):
            self.register_buffer(f"key_{depth}", layer.keys.clone(), persistent=False)
            self.register_buffer(f"value_{depth}", layer.values.clone(), persistent=False)
        self._depth = len(past.layers)

    def _past(self, rows: int) -> Any:
        """Key-value cache of the instruction, expanded to the rows; None without an instruction.

        A new one for each pass, which extends it.
        """
        if not self._depth:
            return None
        cache = require("transformers").DynamicCache(config=self.language.config)
        for depth in range(self._depth):
            pair = (self.get_buffer(f"{kind}_{depth}") for kind in ("key", "value"))
            cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), depth)
        return cache

    def reset_adapter(self, features: Tensor, seed: int) -> None:
        """Initialise the adapter so that visual tokens have the mean norm of the input embeddings.

        Args:
            features: Some visual features, (N, width).
            seed: Seed of the initialisation; the global random state is left untouched.
        """
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            length = float(self.words.weight.float().pow(2).mean().sqrt())
            scale = length / float(features.float().pow(2).sum(1).mean().sqrt())
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
        """Next-token logits after the visual tokens and after each caption token, (B, 1 + T, V).

        Captions are padded at the end and attention is causal, so no mask is needed.
        """
        visual = self.adapter(features).unflatten(1, (self.tokens, -1))  # (B, tokens, E)
        inputs = torch.cat([visual.to(self.words.weight.dtype), self.words(captions)], 1)
        found: Tensor = self.language(
            inputs_embeds=inputs,
            past_key_values=self._past(len(inputs)),
            use_cache=False,
            logits_to_keep=captions.size(1) + 1,
        ).logits
        return found

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
