"""The clean pass of ranks that share the rows of a batch: each runs its part of the points.

It sends losses and recorded outputs to the others, several in a message, unless that takes longer
than to compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.engine.layout import Layout
from flops.passes.ranks import Ranks
from flops.passes.replay import Passes
from flops.passes.structure import FEW, FOLDED, Leaf, Structure

LEAST = 2  # points of a rank: one-row kernels round differently
BUCKET = 1 << 22  # values of a message that more than one tensor shares
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
    outputs, spec = tree_flatten(seen[0]) if seen else ([], None)
    every = [(record[n], layout.structure.calls[n].leaves) for n in sorted(record)]
    every.append((outputs, _outputs(layout.structure) if seen else []))
    # Values without a batch axis are the same on all ranks.
    mine = [(v, leaf.axis) for of in every for v, leaf in zip(*of, strict=True) if _has_rows(leaf)]
    mine += [(losses, 0)] if embedding is None else [(losses, 0), (embedding.value, 0)]
    whole = iter(_joined(mine, begin, size, ranks))
    for values, leaves in every:
        pairs = zip(values, leaves, strict=True)
        values[:] = [next(whole) if _has_rows(leaf) else value for value, leaf in pairs]
    losses = next(whole)
    if embedding is not None:
        embedding.value = next(whole)
    if seen and spec is not None:
        seen[0] = tree_unflatten(outputs, spec)
    return losses, record


def _joined(
    mine: Sequence[tuple[Tensor, int]], begin: int, size: int, ranks: Ranks
) -> list[Tensor]:
    """The parts of all ranks along an axis of each tensor.

    Args:
        mine: Tensors of this rank's points, and their axis.
        begin: Its first point.
        size: Points of the batch.
        ranks: The ranks.
    """
    rows = [tensor.movedim(axis, 0) for tensor, axis in mine]
    found: dict[int, Tensor] = {}
    for at in _messages(rows, size):
        kind = _sent_as(rows[at[0]].dtype)
        # A point's values of all tensors are neighbours, since a rank sends one piece.
        sent = torch.cat([rows[i].reshape(len(rows[i]), -1).to("cpu", kind) for i in at], 1)
        width = sent.size(1)
        whole = ranks.all_gather(sent.reshape(-1), begin * width, size * width).view(size, width)
        parts = whole.split([rows[i][0].numel() for i in at], 1)
        found |= dict(zip(at, parts, strict=True))
    wholes = []
    for i, (tensor, axis) in enumerate(mine):
        part = found[i].to(tensor.device, tensor.dtype).reshape(size, *rows[i].shape[1:])
        wholes.append(part.movedim(0, axis).contiguous())
    return wholes


def _messages(rows: Sequence[Tensor], size: int) -> Iterator[list[int]]:
    """Numbers of tensors of one type that fit into a message."""
    for kind in dict.fromkeys(_sent_as(tensor.dtype) for tensor in rows):
        at, values = list[int](), 0
        for i, tensor in enumerate(rows):
            if _sent_as(tensor.dtype) != kind:
                continue
            more = size * tensor[0].numel()
            if at and values + more > BUCKET:
                yield at
                at, values = [], 0
            at, values = [*at, i], values + more
        yield at


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
