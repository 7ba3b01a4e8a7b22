"""The clean pass: losses without noise, outputs that queries replay, and what the loss reads.

Ranks that share the rows of a batch share the points of its clean pass, too: each runs its part,
and sends losses and recorded outputs to the others, unless that takes longer than to compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.engine.layout import Layout
from flops.passes.batch import check_finite
from flops.passes.loss_view import LossView, loss_view
from flops.passes.ranks import Ranks
from flops.passes.replay import Passes
from flops.passes.structure import FEW, FOLDED, Leaf, Structure

LEAST = 2  # points of a rank: one-row kernels round differently
WORTH = 100  # FLOPs of a pass for each value that is sent: about what both take on two cores

Clean = tuple[Tensor, dict[int, list[Any]], LossView | None]


def clean_pass(
    passes: Passes,
    layout: Layout,
    reads: bool,
    ranks: Ranks,
    check: Callable[[], None],
    view: bool,
) -> Clean:
    """Losses, recorded calls and the loss's view of the clean pass, the same on all ranks.

    Args:
        passes: Passes over the batch.
        layout: Its layout.
        reads: Whether anything reads the clean pass; else there is none, and losses are NaN.
        ranks: Ranks that share the rows.
        check: Raises if the pass was random.
        view: Whether estimators read what the loss reads of the outputs.
    """
    size, embedding = passes.batch.size, layout.embedding
    if not reads:
        dtype = layout.structure.losses.dtype
        return torch.full((size,), torch.nan, dtype=dtype), {}, None
    seen: list[Any] = []
    see = (lambda *outputs: seen.extend(outputs)) if view else None
    shared = ranks.size > 1 and size >= LEAST * ranks.size and _worth_sharing(layout, view)
    begin, end = ranks.shard(size) if shared else (0, size)
    rows = torch.arange(begin, end) if shared else None
    losses, found = passes.clean(layout.needed, embedding, rows=rows, see=see)
    record = dict(found)
    check()
    if shared:
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
    else:
        losses = ranks.broadcast(losses)
    check_finite(losses, "the clean pass")
    return losses, record, loss_view(passes.batch, *seen) if seen else None


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


def _worth_sharing(layout: Layout, view: bool) -> bool:
    """Whether a point's clean pass takes longer than to send what it found; equal on all ranks."""
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
