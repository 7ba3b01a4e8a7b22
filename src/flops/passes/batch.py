"""A batch of points: inputs and targets, indexed by row.

A *row* is one pass of one point; a point has one row per query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from flops.errors import BatchError, NonFiniteLossError
from flops.losses.base import TokenLoss, bound_arguments, optional_arguments
from flops.losses.derive import advice

LossFunction = Callable[[Any, Any], Tensor]
See = Callable[[Any, Tensor | None], None]
"""Called with the outputs of a pass, and the positions of their logits if not all."""

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shared:
    """Marks an input or target that all points share: it is never indexed by row.

    Needed only if its first size equals the batch size by coincidence, for example ten class
    prompts passed to CLIP with ten images: ``{"input_ids": Shared(prompts), ...}``.
    """

    tensor: Any


class Batch:
    """Inputs and targets of B points, and a function that runs any subset of rows.

    Tensors and arrays whose first size is B, and lists of B Python objects, are indexed by row;
    everything else is passed unchanged. B is the first size in the targets, else in the inputs.

    Args:
        inputs: A tensor (``model(x)``), a tuple (``model(*x)``) or a mapping (``model(**x)``).
        targets: Second argument of ``loss_fn``.
        loss_fn: ``losses = loss_fn(outputs, targets)``, one loss per row.

    Raises:
        BatchError: If the batch is empty, or inputs and targets differ in size.
    """

    def __init__(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._leaves, self._spec = _flatten(_arguments(inputs))
        self._targets, self._target_spec = _flatten(targets)
        if len(self._targets) == 1 and isinstance(self._targets[0], Mapping):
            # A BatchEncoding, which pytree does not flatten.
            self._targets, self._target_spec = _flatten(dict(self._targets[0]))
        self.size = self._batch_size()
        # Of the whole batch, so that all rows of a pass have the same number.
        self._positions: Tensor | None = None
        if isinstance(loss_fn, TokenLoss):
            if targets is None:
                raise BatchError(
                    f"{type(loss_fn).__name__} needs labels, and there are none; for language "
                    "models transformers' DataCollatorForLanguageModeling(tokenizer, mlm=False) "
                    "adds them"
                )
            self._positions = loss_fn.positions(targets)

    def _batch_size(self) -> int:
        tensors_first = sorted(self._leaves, key=lambda leaf: isinstance(leaf, list))
        inputs = [n for n in map(_length, tensors_first) if n is not None]
        targets = [n for n in map(_length, self._targets) if n is not None]
        if not inputs + targets:
            raise BatchError(
                "no tensor with a batch axis in the inputs or the targets; give each point a row"
            )
        size = (targets + inputs)[0]
        if size == 0:
            raise BatchError("the batch is empty: a tensor or list with first size 0 was given")
        if inputs and size not in inputs:
            raise BatchError(
                f"the targets have {size} points, but the first sizes of the inputs are {inputs}; "
                "give one row per point in both, and mark shared ones with flops.Shared"
            )
        return size

    @property
    def leaves(self) -> list[Any]:
        """All leaves of inputs and targets."""
        found = [*self._leaves, *self._targets]
        return [leaf.tensor if isinstance(leaf, Shared) else leaf for leaf in found]

    def signatures(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Cache keys of the shapes and of the structure of a forward pass, without the batch size.

        The first contains all sizes, the second only numbers of axes, and which sizes are 0 or 1.
        """
        shapes: list[tuple[Any, ...]] = []
        kinds: list[tuple[Any, ...]] = []
        for leaf in self._leaves:
            value = leaf.tensor if isinstance(leaf, Shared) else leaf
            cut = 1 if self._is_cut(leaf) else 0
            if isinstance(value, Tensor | np.ndarray):
                shape = tuple(value.shape[cut:])
                shapes.append((type(leaf), cut, shape, value.dtype))
                kinds.append((type(leaf), cut, tuple(min(n, 2) for n in shape), value.dtype))
            else:
                shapes.append((type(leaf), cut, None if cut else repr(value)))
                kinds.append(shapes[-1])
        kept = None if self._positions is None else len(self._positions)
        return (str(self._spec), tuple(shapes), kept), (str(self._spec), tuple(kinds))

    def _is_cut(self, leaf: Any) -> bool:
        return _length(leaf) == self.size

    def _rows(self, leaf: Any, rows: Tensor | None) -> Any:
        if isinstance(leaf, Shared):
            return leaf.tensor
        if rows is None or not self._is_cut(leaf):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, rows.to(leaf.device))
        if isinstance(leaf, np.ndarray):
            return leaf[rows.numpy()]
        return [leaf[i] for i in rows.tolist()]

    def saving(self, model: nn.Module) -> frozenset[str]:
        """Arguments of the model that save computation, and are not in the inputs."""
        args, kwargs = self.arguments(None)
        given = set(kwargs) | bound_arguments(model, len(args))
        return frozenset(optional_arguments(model) - given)

    def losses(
        self,
        model: nn.Module,
        rows: Tensor | None = None,
        see: See | None = None,
        saving: frozenset[str] | None = None,
    ) -> Tensor:
        """Losses of the rows, one each, in float32 or wider.

        Args:
            model: The model.
            rows: Points to run; None for all.
            see: Called with the outputs before the loss function.
            saving: What `saving` returns, if known.

        Raises:
            BatchError: If the loss function returns anything but one loss per row.
        """
        args, kwargs = self.arguments(rows)
        takes = self.saving(model) if saving is None else saving
        if "use_cache" in takes:  # nothing is generated
            kwargs = {**kwargs, "use_cache": False}
        positions = self._positions if "logits_to_keep" in takes else None
        if positions is not None:
            kwargs = {**kwargs, "logits_to_keep": positions}
        outputs = wide(model(*args, **kwargs))
        if see is not None:
            see(outputs, positions)
        losses = self.loss(outputs, rows, positions)
        count = self.size if rows is None else len(rows)
        if not isinstance(losses, Tensor) or tuple(losses.shape) != (count,):
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            if isinstance(losses, Tensor) and not losses.dim():
                got = "a mean over the batch"
            raise BatchError(
                f"the loss function must return one loss per point, a tensor of shape (B,), but "
                f"returned {got[:80]} for {count} points. {advice(model)}"
            )
        if not losses.is_floating_point():
            losses = losses.double()
        return losses if losses.dtype == torch.float64 else losses.float()

    def loss(self, outputs: Any, rows: Tensor | None, positions: Tensor | None) -> Any:
        """What the loss function returns for these outputs."""
        targets = tree_unflatten(
            [self._rows(leaf, rows) for leaf in self._targets], self._target_spec
        )
        if positions is not None and isinstance(self._loss_fn, TokenLoss):
            return self._loss_fn(outputs, targets, positions)
        return self._loss_fn(outputs, targets)

    def named(self, name: str) -> Tensor | None:
        """A keyword argument that is a tensor with a batch axis, else None."""
        value = self.arguments(None)[1].get(name)
        return value if isinstance(value, Tensor) and self._is_cut(value) else None

    def arguments(self, rows: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for these rows."""
        args, kwargs = tree_unflatten([self._rows(leaf, rows) for leaf in self._leaves], self._spec)
        return args, kwargs


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor | np.ndarray | Shared):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise BatchError(
        f"inputs must be a tensor, a tuple (model(*inputs)) or a dict (model(**inputs)), "
        f"not {type(inputs).__name__}; give a list of objects as (objects,)"
    )


def _flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of a tree; a list without tensors is one leaf, with one object per point."""
    return tree_flatten(
        tree,
        is_leaf=lambda x: isinstance(x, list) and not any(isinstance(i, Tensor) for i in x),
    )


def _length(leaf: Any) -> int | None:
    """First size of a leaf that can be indexed by row, else None."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def wide(outputs: Any) -> Any:
    """Outputs in float32 or wider: a loss in half precision has two or three digits."""
    return tree_map(
        lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _NARROW else x, outputs
    )


def positions(index: Tensor | Sequence[int] | None, size: int) -> Tensor | None:
    """Checks the points' positions in the data set, and returns them as a tensor.

    Raises:
        BatchError: Unless there is one integer per point, all different.
    """
    if index is None:
        return None
    places = torch.as_tensor(index).cpu()
    if places.dim() != 1 or places.dtype not in (torch.int64, torch.int32):
        raise BatchError(
            f"index must be one integer per point, not {places.dtype} of shape "
            f"{tuple(places.shape)}"
        )
    if len(places) != size:
        raise BatchError(f"index has {len(places)} entries for {size} points")
    if len(places.unique()) != size:
        raise BatchError("index contains a point twice: its rows would share noise")
    return places


def check_finite(losses: Tensor, where: str, points: Tensor | None = None) -> None:
    """Raise if a loss is NaN or infinite.

    Raises:
        NonFiniteLossError: With the place and the first rows.
    """
    bad = torch.nonzero(~torch.isfinite(losses)).flatten()
    if len(bad):
        rows = bad[:8].tolist()
        at = "" if points is None else f" (points {points[bad[:8]].tolist()})"
        raise NonFiniteLossError(
            f"{len(bad)} of {len(losses)} losses are not finite in {where}: rows {rows}{at}. "
            "Parameters and .grad are as before; lower the learning rate or sigma, inspect these "
            "points, or, if the model's control flow depends on the data, try reuse=False."
        )
