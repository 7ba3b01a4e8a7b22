"""Embeddings: similarity of points, for the kernel of the Gaussian allocator.

By default the input of the head (the last linear layer that runs), or the output of a module chosen
by the user. Sequences (B, T, E) are averaged over positions; tensors with more axes are flattened,
since their position axes are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from flops.errors import CoverageError
from flops.passes.structure import FOLDED, Call, Leaf, Structure


@dataclass
class Embedding:
    """Observes one call of the clean pass and keeps one vector per point.

    Attributes:
        call: Number of the call.
        position: Index of the leaf in its arguments or output.
        axis: Batch axis of that tensor.
        output: Whether the leaf is in the output.
        value: The vectors of the last clean pass, shape (B, E).
    """

    call: int
    position: int
    axis: int
    output: bool
    value: Tensor = field(default_factory=lambda: torch.empty(0))

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Read the vectors from a call."""
        leaves = tree_flatten(out if self.output else (args, kwargs))[0]
        rows = leaves[self.position].detach().movedim(self.axis, 0).float()
        if rows.dim() == 3:
            rows = rows.mean(1)
        self.value = rows.reshape(len(rows), -1).cpu()  # (B, E)


def find_embedding(
    structure: Structure, modules: Mapping[str, nn.Module], wanted: nn.Module | str | None
) -> Embedding | None:
    """The tensor of a forward pass to use as embedding; None if there is no suitable one.

    Raises:
        CoverageError: If the wanted module is unknown, never runs or returns nothing per point.
    """
    if wanted is None:
        heads = [c for c in structure.calls if isinstance(modules[c.name], nn.Linear)]
        for call in sorted(heads, key=lambda c: c.end, reverse=True):
            found = _fitting(call.inputs)
            if found is not None:
                return Embedding(call.number, *found, output=False)
        return None
    names = [n for n, m in modules.items() if m is wanted or n == wanted]
    if not names:
        raise CoverageError(f"embedding: {wanted!r} is not a module of the model")
    calls: list[Call] = structure.of(names[0])
    found = _fitting(calls[-1].leaves) if calls else None
    if found is None:
        raise CoverageError(f"embedding: '{names[0]}' never runs, or returns nothing per point")
    return Embedding(calls[-1].number, *found, output=True)


def _fitting(leaves: list[Any]) -> tuple[int, int] | None:
    for position, leaf in enumerate(leaves):
        floating = isinstance(leaf, Leaf) and leaf.dtype.is_floating_point
        if floating and leaf.axis is not None and leaf.axis != FOLDED and len(leaf.shape) > 1:
            return position, leaf.axis
    return None
