"""A causal language model of transformers that reads vectors, then tokens.

    p(t_1 .. t_T | instruction, v_1 .. v_N)

The instruction's keys and values are the same for all rows and passes, so they are computed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flops.optional import require


class PrefixLanguage(nn.Module):
    """A frozen causal language model after an instruction; see `LanguageReader`.

    Args:
        model: A causal language model of transformers; it is frozen, in evaluation mode.
        instruction: Tokens before the vectors, (P,); may be empty.
    """

    def __init__(self, model: nn.Module, instruction: Tensor) -> None:
        super().__init__()
        self.model: Any = model.eval()
        self.model.requires_grad_(False)
        self._depth = 0
        if len(instruction):
            self._cache_instruction(instruction)

    @property
    def words(self) -> nn.Embedding:
        """The input embeddings."""
        found: nn.Embedding = self.model.get_input_embeddings()
        return found

    @property
    def width(self) -> int:
        """Size of an input embedding."""
        return self.words.weight.size(1)

    def embedding_scale(self) -> float:
        """Root mean square of the entries of the input embeddings."""
        return float(self.words.weight.float().pow(2).mean().sqrt())

    def _cache_instruction(self, instruction: Tensor) -> None:
        """Store keys and values of the instruction as buffers, so that they move with the model."""
        with torch.no_grad():
            past = self.model(instruction[None], use_cache=True).past_key_values
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
        cache = require("transformers").DynamicCache(config=self.model.config)
        for depth in range(self._depth):
            pair = (self.get_buffer(f"{kind}_{depth}") for kind in ("key", "value"))
            cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), depth)
        return cache

    def forward(self, embeddings: Tensor, tokens: Tensor) -> Tensor:
        """Next-token logits after the embeddings and after each token, (B, 1 + T, V).

        Tokens are padded at the end and attention is causal, so no mask is needed.

        Args:
            embeddings: Vectors before the tokens, (B, N, width).
            tokens: Token ids, (B, T).
        """
        inputs = torch.cat([embeddings.to(self.words.weight.dtype), self.words(tokens)], 1)
        found: Tensor = self.model(
            inputs_embeds=inputs,
            past_key_values=self._past(len(inputs)),
            use_cache=False,
            logits_to_keep=tokens.size(1) + 1,
        ).logits
        return found
