"""A batch of points: how inputs and targets are passed to the model and cut into rows.

A *row* is one pass of one point; the same point fills as many rows as it has queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from flops.errors import BatchError

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Shared:
    """Marks an input tensor that all points share, so that it is never cut into rows.

    Needed only if its first size happens to equal the batch size, for example ten class
    prompts given to CLIP beside ten images: ``{"input_ids": Shared(prompts), ...}``.
    """

    tensor: Tensor


class Batch:
    """Inputs and targets of B points, and how to run any choice of rows of them.

    Args:
        inputs: A tensor (``model(x)``), a tuple (``model(*x)``) or a mapping (``model(**x)``).
        targets: Anything ``loss_fn`` takes. Tensors whose first size is B are cut into rows,
            and so is a plain list of B objects; the rest is passed as it is.
        loss_fn: ``losses = loss_fn(outputs, targets)``, one loss per row.
    """

    def __init__(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> None:
        args, kwargs = _arguments(inputs)
        self._loss_fn = loss_fn
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._targets, self._target_spec = _flatten_targets(targets)
        self.size = self._batch_size()

    def _batch_size(self) -> int:
        for leaf in [*self._targets, *self._leaves]:
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                if leaf.size(0) == 0:
                    raise BatchError("the batch is empty: a tensor with first size 0 was given")
                return leaf.size(0)
            if isinstance(leaf, _Objects):
                return len(leaf.items)
        raise BatchError("no tensor with a batch axis in the inputs or the targets")

    def signature(self) -> tuple[Any, ...]:
        """What the structure of a forward pass may depend on: shapes and types, but for B."""
        shapes: list[tuple[Any, ...]] = []
        for leaf in self._leaves:
            if isinstance(leaf, Shared):
                shapes.append(("shared", tuple(leaf.tensor.shape), leaf.tensor.dtype))
            elif isinstance(leaf, Tensor):
                cut = 1 if self._has_batch_axis(leaf) else 0
                shapes.append((cut, tuple(leaf.shape[cut:]), leaf.dtype))
            else:
                shapes.append(("constant", repr(leaf)))
        return (str(self._spec), tuple(shapes))

    def _has_batch_axis(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) == self.size

    def _rows(self, leaf: Any, rows: Tensor | None) -> Any:
        if isinstance(leaf, Shared):
            return leaf.tensor
        if rows is None:
            return leaf.items if isinstance(leaf, _Objects) else leaf
        if isinstance(leaf, _Objects):
            return [leaf.items[i] for i in rows.tolist()]
        if self._has_batch_axis(leaf):
            return leaf.index_select(0, rows.to(leaf.device))
        return leaf

    def losses(self, model: nn.Module, rows: Tensor | None = None) -> Tensor:
        """One loss per row: the rows' points through the model and the loss, fp32 or wider."""
        args, kwargs = self.arguments(rows)
        outputs = model(*args, **kwargs)
        targets = tree_unflatten(
            [self._rows(leaf, rows) for leaf in self._targets], self._target_spec
        )
        losses = self._loss_fn(outputs, targets)
        count = self.size if rows is None else len(rows)
        if not isinstance(losses, Tensor) or tuple(losses.shape) != (count,):
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise BatchError(
                f"the loss function must return one loss per point, shape ({count},), but "
                f'returned {got}. Use reduction="none", and average a per-token loss over the '
                "tokens of each point."
            )
        if not losses.is_floating_point():
            losses = losses.double()
        return losses if losses.dtype == torch.float64 else losses.float()

    def arguments(self, rows: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for these rows."""
        args, kwargs = tree_unflatten([self._rows(leaf, rows) for leaf in self._leaves], self._spec)
        return args, kwargs


@dataclass(frozen=True)
class _Objects:
    """A list of one Python object per point; wrapped so that the tree does not open it."""

    items: list[Any]


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor | Shared):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise BatchError(
        f"inputs must be a tensor, a tuple (model(*inputs)) or a dict (model(**inputs)), "
        f"not {type(inputs).__name__}"
    )


def _flatten_targets(targets: Any) -> tuple[list[Any], TreeSpec]:
    if isinstance(targets, list) and not any(isinstance(item, Tensor) for item in targets):
        targets = _Objects(targets)
    return tree_flatten(targets)
