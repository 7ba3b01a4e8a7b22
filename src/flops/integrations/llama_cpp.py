"""llama.cpp: a frozen language model in a GGUF file, as a module of a larger model.

    x -> adapter -> vectors, then tokens -> llama.cpp -> logits -> loss

The model stays as it is quantised in the file, 4 bits a weight or what it has; there is no backward
pass. Likelihood ratio needs none: noise on the vectors goes through the model to the loss, and what
made them (an adapter, a soft prompt) gets its gradient by a local VJP of its own.

llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights, so the loss
is a staircase: `LikelihoodRatio("auto")`, the default, finds a sigma above its steps.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flops.integrations.llama_cpp_context import MOST_ROWS, LlamaContext, LlamaCppError
from flops.integrations.no_backward import without_backward
from flops.optional import require

__all__ = ["LlamaCppError", "LlamaCppModule"]


class LlamaCppModule(nn.Module):
    """A GGUF model in llama.cpp as a frozen module that reads vectors, then tokens.

    It has no parameters and an empty `state_dict`. Copies share the model; a pickle holds the path,
    and opens it again. Backward and forward-mode differentiation through it raise `BackwardError`.
    Runs on the CPU; outputs come back on the device of the vectors.

    Args:
        path: A GGUF file of a causal language model.
        prefix: Tokens before the vectors; their keys and values are computed once.
        rows: Rows per pass of llama.cpp; more are split.
        threads: Threads of a pass; None for `torch.get_num_threads()`.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
        FileNotFoundError: There is no such file.
        LlamaCppError: llama.cpp cannot load it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: Sequence[int] | Tensor = (),
        rows: int = 16,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows must be 1 to {MOST_ROWS}, not {rows}")
        tokens = prefix.tolist() if isinstance(prefix, Tensor) else prefix
        self.path, self.prefix = Path(path).absolute(), tuple(int(t) for t in tokens)
        self.rows, self.threads = rows, threads
        self._context = LlamaContext(self.path, self.prefix, rows)

    @property
    def width(self) -> int:
        """Size of an input embedding."""
        return self._context.width

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self._context.vocabulary

    def forward(
        self,
        embeddings: Tensor,
        tokens: Tensor,
        at: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        """Next-token logits after the embeddings and after each token, (B, 1 + T, vocabulary).

        Tokens are padded at the end and attention is causal, so no mask is needed.

        Args:
            embeddings: Vectors before the tokens, (B, N, width).
            tokens: Token ids, (B, T); T may be 0.
            at: Where each row's logits are wanted, for (B, vocabulary): 0 is after the embeddings,
                t after the first t tokens, (B,). None for all places.
            before: Tokens of each row between the prefix and the vectors, (B, P), padded with -1
                at the end. Rows of a pass with the same ones share their keys and values.

        Raises:
            LlamaCppError: Shapes do not fit, a token is unknown, or the run fails.
        """
        before = tokens.new_empty(len(tokens), 0) if before is None else before
        self._check(embeddings, tokens, before)
        wanted = torch.ones(len(tokens), 1 + tokens.size(1), dtype=torch.bool)
        if at is not None:
            if at.shape != (len(tokens),) or bool(((at < 0) | (at > tokens.size(1))).any()):
                raise LlamaCppError(f"at must be 0 to {tokens.size(1)} for each row, not {at}")
            wanted = torch.arange(1 + tokens.size(1)) == at.cpu()[:, None]
        (found,) = without_backward("llama.cpp", self._run, before, embeddings, tokens, wanted)
        return found if at is not None else found.view(*wanted.shape, self.vocabulary)

    def embeddings(self, tokens: Tensor | None = None) -> Tensor:
        """Input embeddings of some tokens, (..., width); of all, (V, width), for None.

        They are read from the file, and dequantised.
        """
        gguf = require("gguf", "llm")
        tensors = gguf.GGUFReader(self.path).tensors
        (table,) = (t for t in tensors if t.name == "token_embd.weight")
        rows = slice(None) if tokens is None else tokens.flatten().cpu().numpy()
        found = torch.from_numpy(gguf.dequantize(table.data[rows], table.tensor_type).copy())
        return found if tokens is None else found.view(*tokens.shape, self.width)

    def embedding_scale(self) -> float:
        """Root mean square of the entries of the input embeddings."""
        return float(self.embeddings().pow(2).mean().sqrt())

    def extra_repr(self) -> str:
        """File, width and sizes."""
        return (
            f"{self.path.name}, width={self.width}, vocabulary={self.vocabulary}, "
            f"prefix={len(self.prefix)}, rows={self.rows}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppModule:
        new = type(self).__new__(type(self))
        memo[id(self)], memo[id(self._context)] = new, self._context
        new.__dict__.update({name: copy.deepcopy(x, memo) for name, x in self.__dict__.items()})
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "_context"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._context = LlamaContext(self.path, self.prefix, self.rows)

    def _check(self, embeddings: Tensor, tokens: Tensor, before: Tensor) -> None:
        rows = len(embeddings) if embeddings.dim() else 0
        fits = embeddings.dim() == 3 and embeddings.size(1) > 0 and embeddings.size(2) == self.width
        if not fits or tokens.dim() != 2 or len(tokens) != rows or tokens.is_floating_point():
            raise LlamaCppError(
                f"need vectors of shape (B, N, {self.width}) with N at least 1 and tokens of shape "
                f"(B, T), not {tuple(embeddings.shape)} and {tuple(tokens.shape)}"
            )
        if before.dim() != 2 or len(before) != rows or before.is_floating_point():
            raise LlamaCppError(
                f"before must be tokens of shape (B, P) for {rows} rows, not {tuple(before.shape)}"
            )
        there = before >= 0
        if bool((there[:, 1:] & ~there[:, :-1]).any()):
            raise LlamaCppError("before must be padded with -1 at the end only")
        for given in (tokens, before[there]):
            if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < self.vocabulary:
                raise LlamaCppError(f"a token is not among the {self.vocabulary} of the model")

    def _run(
        self, before: Tensor, embeddings: Tensor, tokens: Tensor, wanted: Tensor
    ) -> tuple[Tensor]:
        threads = self.threads or torch.get_num_threads()
        vectors = embeddings.detach().to("cpu", torch.float32).numpy()
        words = tokens.cpu().numpy().astype(np.int32)
        texts = [tuple(t for t in row if t >= 0) for row in before.tolist()]
        owners = wanted.nonzero()[:, 0]
        found = torch.empty(len(owners), self.vocabulary)
        order = sorted(range(len(texts)), key=texts.__getitem__)  # the same ones in the same pass
        for start in range(0, len(order), self.rows):
            part = order[start : start + self.rows]
            own = [texts[row] for row in part]
            marks = wanted[part].numpy()
            logits = self._context.run(own, vectors[part], words[part], marks, threads)
            places = torch.cat([(owners == row).nonzero()[:, 0] for row in part])
            found[places] = torch.from_numpy(logits)
        return (found.to(embeddings.device, embeddings.dtype),)
