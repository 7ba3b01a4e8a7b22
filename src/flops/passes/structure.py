"""The structure of a forward pass, seen once per kind of input by two passes of a few rows.

The passes have two and three rows, so what differs between them is the batch axis, found
structurally and not by a size that happens to match. Recorded are: the calls of all modules in
order, what they return, how much work they do, and where each trainable parameter is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from flops.errors import BatchError
from flops.passes.batch import Batch
from flops.passes.flop_count import UseMeter, WorkMeter
from flops.passes.intercept import Action, everywhere, scripted

FEW, MORE = 2, 3
FOLDED = -1
_CONSTANTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Leaf:
    """One tensor in the output of a call: its shape with MORE rows, and where the batch is.

    ``axis`` is None for a tensor without a batch axis and FOLDED for one whose batch is folded
    into another axis (it can be neither replayed nor perturbed by rows).
    """

    shape: tuple[int, ...]
    axis: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row, without the batch axis."""
        return tuple(size for dim, size in enumerate(self.shape) if dim != self.axis)


@dataclass
class Call:
    """One call of one module: when it started and ended, what it cost, took and returned.

    It is ``rowwise`` if no tensor that it takes or returns folds the batch into another axis.
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
    """A trainable parameter entered a computation while these calls were active."""

    parameter: int
    calls: tuple[int, ...]
    time: int


class Structure:
    """Calls, work and parameter uses of one forward pass, with the outputs of its few rows."""

    def __init__(
        self,
        calls: Sequence[Call],
        uses: Sequence[Use],
        total_work: float,
        outputs: dict[int, list[Any]],
    ) -> None:
        self.calls = list(calls)
        self.uses = list(uses)
        self.total_work = total_work
        self.outputs = outputs  # by call number, of the pass with MORE rows; freed after binding
        self.rows = torch.empty(0)
        self.losses = torch.empty(0)
        self.rounding = 0.0  # how far the losses of the two passes lie apart
        self._by_name: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            self._by_name[call.name].append(call)

    def of(self, name: str) -> list[Call]:
        """The calls of a module, in order; empty if it never ran."""
        return self._by_name.get(name, [])

    def agrees(self, losses: Tensor, places: Tensor) -> bool:
        """Whether losses of the probe's rows are those of the clean pass, but for rounding."""
        tolerance = 1e-5 + 10 * self.rounding
        return torch.allclose(losses, self.losses[places], rtol=1e-4, atol=tolerance)

    def ancestors(self, call: Call) -> Iterator[Call]:
        """The calls that enclose this one, innermost first."""
        while call.parent is not None:
            call = self.calls[call.parent]
            yield call

    def share(self, calls: Sequence[Call]) -> float:
        """The part of a whole forward pass's work that these calls do."""
        return sum(call.work for call in calls) / self.total_work if self.total_work else 0.0


def inspect(
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch, trainable: Mapping[int, str]
) -> Structure:
    """Run the few rows twice and compare; see the module's docstring.

    Raises:
        BatchError: If the loss of a point depends on the other points of the batch.
    """
    few = _Recorder()
    rows = torch.arange(MORE) % batch.size
    uses: list[Use] = []
    watch = UseMeter(trainable, lambda p: uses.append(few.use(p)))
    work = WorkMeter(few.charge)
    with scripted(modules, everywhere(few.action, modules)), watch, work:
        losses_few = batch.losses(model, rows[:FEW])
    few.close()
    more = _Recorder(keep=True, clone={c.number for c in few.calls if c.mutated})
    with scripted(modules, everywhere(more.action, modules)):
        losses = batch.losses(model, rows)
    more.close()
    _check_independent(losses_few, losses[:FEW])
    structure = _merge(few, more, uses, work.total)
    structure.rows, structure.losses = rows, losses
    structure.rounding = float((losses_few - losses[:FEW]).abs().max())
    return structure


def _check_independent(few: Tensor, more: Tensor) -> None:
    tolerance = 1e-3 * max(1.0, float(more.abs().nan_to_num(0, 0, 0).max()))
    if bool(((few - more).abs() > tolerance).any()):
        raise BatchError(
            "the loss of a point changes with the other points of its batch "
            f"({few.tolist()} with {FEW} rows, {more.tolist()} with {MORE}): queries of different "
            "points share a pass, so each loss must depend on its own point alone. Contrastive "
            "losses and statistics over the batch are not supported; mark an input that all "
            "points share with flops.Shared."
        )


class _Recorder:
    """Follows the calls of one pass."""

    def __init__(self, keep: bool = False, clone: set[int] | None = None) -> None:
        self.calls: list[Call] = []
        self.active: list[Call] = []
        self.clock = 0
        self.outputs: dict[int, list[Any]] = {}
        self._keep, self._clone = keep, clone or set()
        self._versions: list[tuple[Call, Tensor, int]] = []

    def action(self, name: str) -> Action:
        def record(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            parent = self.active[-1].number if self.active else None
            call = Call(len(self.calls), name, parent, self._tick())
            self.calls.append(call)
            self.active.append(call)
            given = tree_flatten((args, kwargs))[0]
            call.inputs = [x if isinstance(x, Leaf) else None for x in _describe(given)]
            before = [_version(x) for x in given]
            out = forward(*args, **kwargs)
            # A module that writes into its input must run again: replaying it would not.
            if [_version(x) for x in given] != before:
                call.replayable = False
            self.active.pop()
            call.end = self._tick()
            self._note(call, out)
            return out

        return record

    def use(self, parameter: int) -> Use:
        """A use of a parameter here and now."""
        return Use(parameter, tuple(call.number for call in self.active), self.clock)

    def charge(self, work: float) -> None:
        """Count work for all active calls."""
        for call in self.active:
            call.work += work

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _note(self, call: Call, out: Any) -> None:
        leaves, call.spec = tree_flatten(out)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._versions.append((call, leaf, _version(leaf)))
            elif not isinstance(leaf, _CONSTANTS):
                call.replayable = False
        call.leaves = _describe(leaves)
        if self._keep:
            cloned = call.number in self._clone
            self.outputs[call.number] = [
                x.clone() if cloned and isinstance(x, Tensor) else x for x in leaves
            ]

    def close(self) -> None:
        """Find the outputs that somebody wrote into later, and let go of the tensors."""
        for call, tensor, version in self._versions:
            call.mutated = call.mutated or _version(tensor) != version
        self._versions.clear()


def _version(x: Any) -> int:
    """How often a tensor was written to; inference tensors do not count that."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _describe(leaves: Sequence[Any]) -> list[Any]:
    return [
        Leaf(tuple(x.shape), None, x.dtype, x.device) if isinstance(x, Tensor) else x
        for x in leaves
    ]


def _merge(few: _Recorder, more: _Recorder, uses: Sequence[Use], work: float) -> Structure:
    """The calls that both passes made, in the clock of the first, with their batch axes.

    Where the data decides what runs (a mixture of experts), the calls differ between the passes
    and are left out: only the module around them can be replayed or perturbed.
    """
    children_few, children_more = _children(few.calls), _children(more.calls)
    same: dict[int, int] = {}

    def pair(left: int | None, right: int | None) -> None:
        a, b = children_few[left], children_more[right]
        if [few.calls[i].name for i in a] == [more.calls[j].name for j in b]:
            for i, j in zip(a, b, strict=True):
                same[i] = j
                pair(i, j)

    pair(None, None)
    number = {old: new for new, old in enumerate(sorted(same))}
    calls, outputs = [], {}
    for old, new in number.items():
        call, other = few.calls[old], more.calls[same[old]]
        call.number, outputs[new] = new, more.outputs[other.number]
        call.parent = None if call.parent is None else number[call.parent]
        call.replayable &= other.replayable and len(call.leaves) == len(other.leaves)
        if call.replayable or len(call.leaves) == len(other.leaves):
            pairs = zip(call.leaves, other.leaves, strict=True)
            call.leaves = [_with_axis(a, b) for a, b in pairs]
        alike = len(call.leaves) == len(other.leaves) and len(call.inputs) == len(other.inputs)
        call.inputs = [_with_axis(a, b) for a, b in zip(call.inputs, other.inputs, strict=False)]
        ends = [x for x in [*call.inputs, *call.leaves] if isinstance(x, Leaf)]
        call.rowwise = alike and all(leaf.axis != FOLDED for leaf in ends)
        call.replayable &= all(leaf.axis != FOLDED for _, leaf in call.tensors)
        calls.append(call)
    kept = [
        Use(use.parameter, tuple(number[c] for c in use.calls if c in number), use.time)
        for use in uses
    ]
    return Structure(calls, kept, work, outputs)


def _children(calls: Sequence[Call]) -> dict[int | None, list[int]]:
    children: dict[int | None, list[int]] = defaultdict(list)
    for call in calls:
        children[call.parent].append(call.number)
    return children


def _with_axis(few: Any, more: Any) -> Any:
    if not isinstance(more, Leaf) or not isinstance(few, Leaf):
        return more
    if len(few.shape) != len(more.shape):
        return Leaf(more.shape, FOLDED, more.dtype, more.device)
    sizes = enumerate(zip(few.shape, more.shape, strict=True))
    differ = [(dim, pair) for dim, pair in sizes if pair[0] != pair[1]]
    if not differ:
        return more
    whole = len(differ) == 1 and differ[0][1] == (FEW, MORE)
    return Leaf(more.shape, differ[0][0] if whole else FOLDED, more.dtype, more.device)
