"""The structure of a forward pass: calls of modules, their outputs and work, uses of parameters.

`flops.passes.trace` finds it, once per kind of input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from flops.passes.dataflow import Flow

FEW, MORE = 2, 3
FOLDED = -1


@dataclass(frozen=True)
class Leaf:
    """One tensor in the output of a call: its shape with MORE rows, and its batch axis.

    ``axis`` is None without a batch axis, and FOLDED if the batch is folded into another axis: such
    a tensor can be neither replayed nor perturbed row by row.
    """

    shape: tuple[int, ...]
    axis: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row, without the batch axis."""
        return tuple(size for dim, size in enumerate(self.shape) if dim != self.axis)

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        rows = MORE if self.axis == FOLDED else 1
        sizes = self.shape if self.axis == FOLDED else self.row_shape
        return prod(sizes) // rows * self.dtype.itemsize


@dataclass
class Call:
    """One call of one module: start, end, work, inputs and outputs.

    It is ``rowwise`` if none of its inputs and outputs folds the batch into another axis.
    """

    number: int
    name: str
    parent: int | None
    start: int
    end: int = -1
    work: float = 0.0
    spec: TreeSpec | None = None
    leaves: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    replayable: bool = True
    rowwise: bool = True
    mutated: bool = False

    @property
    def tensors(self) -> list[tuple[int, Leaf]]:
        """Tensors of the output with their positions among its leaves."""
        return [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Leaf)]


@dataclass(frozen=True)
class Use:
    """A trainable parameter was used during these calls."""

    parameter: int
    calls: tuple[int, ...]
    time: int


class Structure:
    """Calls, work, parameter uses and data flow of one forward pass.

    Attributes:
        rows: Points of the pass with MORE rows.
        losses: Their losses.
        rounding: Largest difference between the losses of the two passes.
        trusted: Whether the data flow is sufficient for replays.
        verified: Whether the prefix of a time may be replayed, by trial.
        saving: Arguments of the model that save computation.
    """

    def __init__(
        self, calls: Sequence[Call], uses: Sequence[Use], total_work: float, flow: Flow
    ) -> None:
        self.calls = list(calls)
        self.uses = list(uses)
        self.total_work = total_work
        self.flow = flow
        self.rows = torch.empty(0)
        self.losses = torch.empty(0)
        self.rounding = 0.0
        self.trusted = True
        self.verified: dict[int, bool] = {}
        self.saving: frozenset[str] = frozenset()
        self._by_name: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            self._by_name[call.name].append(call)

    def of(self, name: str) -> list[Call]:
        """The calls of a module, in order; empty if it never ran."""
        return self._by_name.get(name, [])

    def agrees(self, losses: Tensor, places: Tensor) -> bool:
        """Whether losses of traced rows equal those of the clean pass up to rounding."""
        tolerance = 1e-5 + 10 * self.rounding
        return torch.allclose(losses, self.losses[places], rtol=1e-4, atol=tolerance)

    def ancestors(self, call: Call) -> Iterator[Call]:
        """The calls that enclose this one, innermost first."""
        while call.parent is not None:
            call = self.calls[call.parent]
            yield call

    def inside(self, outer: Iterable[int]) -> dict[int, int]:
        """The outer call of every call inside disjoint outer calls, themselves included."""
        found = {number: number for number in outer}
        for call in self.calls:  # parents come before their children
            if call.parent in found:
                found[call.number] = found[call.parent]
        return found

    def share(self, calls: Sequence[Call]) -> float:
        """Share of these calls in the work of a forward pass."""
        return sum(call.work for call in calls) / self.total_work if self.total_work else 0.0
