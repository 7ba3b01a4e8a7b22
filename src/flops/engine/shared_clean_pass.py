"""The clean pass of ranks that share the rows of a batch: each runs its part of the points.

It sends losses and recorded outputs to the others, unless that takes longer than to compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.engine.layout import Layout
from flops.passes.ranks import Ranks
from flops.passes.replay import Passes
from flops.passes.structure import FEW, FOLDED, Leaf, Structure

LEAST = 2  # points of a rank: one-row kernels round differently
WORTH = 100  # FLOPs of a pass for each value that is sent: about what both take on two cores


def shared_clean_pass(
    passes: Passes, layout: Layout, ranks: Ranks, check: Callable[[], None], seen: list[Any] | None
) -> tuple[Tensor, dict[int, list[Any]]]:
    """Losses and recorded calls of the clean pass, the same on all ranks.

    Args:
        passes: Passes over the batch.
        layout: Its layout.
        ranks: Ranks that share the rows.
        check: Raises if the pass was random.
        seen: Receives the outputs of the model and the positions of their logits; None if nothing
            reads them.
    """
    size, embedding = passes.batch.size, layout.embedding
    begin, end = ranks.shard(size)
    see = None if seen is None else lambda *outputs: seen.extend(outputs)
    losses, found = passes.clean(layout.needed, embedding, rows=torch.arange(begin, end), see=see)
    record = dict(found)
    check()
    part = _Part(ranks, begin, size)
    losses = part.join(losses, 0)
    calls = layout.structure.calls
    for number in sorted(record):
        record[number] = part.join_leaves(record[number], calls[number].leaves)
    if embedding is not None:
        embedding.value = part.join(embedding.value, 0)
    if seen:
        leaves, spec = tree_flatten(seen[0])
        joined = part.join_leaves(leaves, _outputs(layout.structure))
        seen[0] = tree_unflatten(joined, spec)
    return losses, record


class _Part:
    """This rank's part of the points.

    Args:
        ranks: The ranks.
        begin: Its first point.
        size: Points of the batch.
    """

    def __init__(self, ranks: Ranks, begin: int, size: int) -> None:
        self._ranks, self._begin, self._size = ranks, begin, size

    def join(self, mine: Tensor, axis: int) -> Tensor:
        """The parts of all ranks along an axis."""
        rows = mine.movedim(axis, 0)
        width = rows[0].numel()
        sent = rows.reshape(-1).to(_sent_as(mine.dtype))
        whole = self._ranks.all_gather(sent, self._begin * width, self._size * width)
        whole = whole.to(mine.device, mine.dtype).view(self._size, *rows.shape[1:])
        return whole.movedim(0, axis).contiguous()

    def join_leaves(self, mine: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Leaves of a call's output; those without a batch axis are the same on all ranks."""
        return [
            self.join(value, leaf.axis) if _has_rows(leaf) else value
            for value, leaf in zip(mine, leaves, strict=True)
        ]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Leaf) and leaf.axis is not None


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    """A type that holds all values, and that every backend can add to zeros."""
    if dtype.is_floating_point:
        return torch.promote_types(torch.float32, dtype)
    return dtype if dtype in (torch.int32, torch.int64) else torch.int64


def _outputs(structure: Structure) -> list[Any]:
    """Leaves of the model's own output."""
    found = structure.of("")
    return found[0].leaves if len(found) == 1 else []


def worth_sharing(layout: Layout, size: int, ranks: Ranks, view: bool) -> bool:
    """Whether a point's clean pass takes longer than to send what it found; equal on all ranks.

    Args:
        layout: Layout of the batch.
        size: Its points.
        ranks: Ranks that share its rows.
        view: Whether estimators read what the loss reads of the outputs.
    """
    if size < LEAST * ranks.size:
        return False
    structure = layout.structure
    leaves = [leaf for number in layout.needed for leaf in structure.calls[number].leaves]
    if view:
        outputs = _outputs(structure)
        if not outputs:
            return False
        leaves += outputs
    sent = [leaf for leaf in leaves if _has_rows(leaf)]
    if any(leaf.axis == FOLDED or leaf.dtype.is_complex for leaf in sent):
        return False
    values = sum(leaf.row_bytes // leaf.dtype.itemsize for leaf in sent)
    return bool(structure.total_work / FEW >= WORTH * values)  # its work is that of FEW rows
