"""Tracing: the structure of a forward pass is found once per kind of input with two and three rows.

Sizes that differ between the two passes are batch axes. The trace contains the calls of all modules
in order, their outputs and work, the uses of each trainable parameter, and the data flow
(`flops.passes.dataflow`).

Shapes and work depend on the length of a sequence, the structure does not: another length of a
known kind of input takes one pass of two rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import BatchError
from flops.passes.batch import Batch
from flops.passes.dataflow import ROOT, Flow, FlowMeter
from flops.passes.flop_count import UseMeter, WorkMeter
from flops.passes.replay import Action, everywhere, intercepted
from flops.passes.structure import FEW, FOLDED, MORE, Call, Leaf, Structure, Use

_CONSTANTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_DIFFERENT = object()


def inspect(
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch, trainable: Mapping[int, str]
) -> Structure:
    """Trace with two and three rows, and compare; see the module's docstring.

    Raises:
        BatchError: If the loss of a point depends on the other points of the batch.
    """
    known = [*model.parameters(), *_tensors_of(modules), *batch.leaves]
    learning = [p for p in model.parameters() if id(p) in trainable]
    few, more = (_Recorder(FlowMeter(known, learning)) for _ in range(2))
    rows = torch.arange(MORE) % batch.size
    uses: list[Use] = []
    watch = UseMeter(trainable, lambda p: uses.append(few.use(p)))
    work = WorkMeter(few.charge)
    with intercepted(modules, everywhere(few.copying, modules)), watch, work, few.meter:
        losses_few = batch.losses(model, rows[:FEW])
    few.close()
    few.meter.end(losses_few)
    with intercepted(modules, everywhere(more.action, modules)), more.meter:
        losses = batch.losses(model, rows)
    more.close()
    few.meter.settle(more.meter)
    _check_independent(losses_few, losses[:FEW])
    structure = _merge(few, more, uses)
    structure.rows, structure.losses = rows, losses
    structure.rounding = float((losses_few - losses[:FEW]).abs().max())
    structure.saving = batch.saving(model)
    return structure


def resized(
    known: Structure, model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch
) -> Structure | None:
    """The structure for another length, by one pass of two rows; None if the calls differ."""
    recorder, rows = _Recorder(), torch.arange(FEW) % batch.size
    work = WorkMeter(recorder.charge)
    with intercepted(modules, everywhere(recorder.action, modules)), work:
        batch.losses(model, rows)
    recorder.close()
    seen = recorder.calls
    if len(seen) != len(known.calls):  # the data or the length determines what runs
        return None
    calls = [_resized(old, new) for old, new in zip(known.calls, seen, strict=True)]
    if any(call is None for call in calls):
        return None
    structure = Structure(
        [c for c in calls if c is not None], known.uses, recorder.work, known.flow
    )
    structure.rows, structure.losses = known.rows, known.losses
    structure.rounding, structure.trusted = known.rounding, known.trusted
    structure.verified, structure.saving = known.verified, known.saving
    return structure


def _resized(old: Call, new: Call) -> Call | None:
    if (old.name, old.parent, old.mutated) != (new.name, new.parent, new.mutated):
        return None
    if old.replayable and (old.spec != new.spec or not new.replayable):
        return None
    ends = [(old.leaves, new.leaves), (old.inputs, new.inputs)]
    fitted = []
    for before, after in ends:
        if len(before) != len(after):
            return None
        leaves = [_at_length(a, b) for a, b in zip(before, after, strict=True)]
        if any(leaf is _DIFFERENT for leaf in leaves):
            return None
        fitted.append(leaves)
    return replace(old, work=new.work, leaves=fitted[0], inputs=fitted[1])


def _at_length(old: Any, new: Any) -> Any:
    """The new leaf if it differs only in length, else _DIFFERENT."""
    if not isinstance(old, Leaf) or not isinstance(new, Leaf):
        return new if isinstance(old, Leaf) == isinstance(new, Leaf) else _DIFFERENT
    alike = (old.dtype, old.device, len(old.shape)) == (new.dtype, new.device, len(new.shape))
    if not alike or (old.axis not in (None, FOLDED) and new.shape[old.axis] != FEW):
        return _DIFFERENT
    if old.axis in (None, FOLDED):
        return replace(old, shape=new.shape)
    return replace(old, shape=(*new.shape[: old.axis], MORE, *new.shape[old.axis + 1 :]))


def _tensors_of(modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """Buffers, and tensors in attributes of modules."""
    for module in modules.values():
        yield from module._buffers.values()
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tree_flatten(value)[0]


def _check_independent(few: Tensor, more: Tensor) -> None:
    tolerance = 1e-3 * max(1.0, float(more.abs().nan_to_num(0, 0, 0).max()))
    if bool(((few - more).abs() > tolerance).any()):
        raise BatchError(
            "the loss of a point depends on the other points of its batch "
            f"({few.tolist()} with {FEW} rows, {more.tolist()} with {MORE}): queries of different "
            "points share a pass, so each loss must depend only on its own point. Contrastive "
            "losses and batch statistics are not supported; mark an input that all points share "
            "with flops.Shared."
        )


class _Recorder:
    """Records the calls of one pass."""

    def __init__(self, meter: FlowMeter | None = None) -> None:
        self.meter = meter or FlowMeter([], [])
        self.calls: list[Call] = []
        self.active: list[Call] = []
        self.clock, self.work = 0, 0.0
        self._versions: list[tuple[Call, Tensor, int]] = []

    def action(self, name: str, copy: bool = False) -> Action:
        def record(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            parent = self.active[-1].number if self.active else None
            call = Call(len(self.calls), name, parent, self._tick())
            self.calls.append(call)
            self.active.append(call)
            self.meter.call = call.number
            given = tree_flatten((args, kwargs))[0]
            call.inputs = [x if isinstance(x, Leaf) else None for x in _describe(given)]
            before = [_version(x) for x in given]
            out = forward(*args, **kwargs)
            # A module that modifies its input must run again, since a replay would not.
            if [_version(x) for x in given] != before:
                call.replayable = False
            leaves, call.spec = tree_flatten(out)
            if copy:
                leaves = self.meter.copied(call.number, leaves)
                out = tree_unflatten(leaves, call.spec)
            self.active.pop()
            self.meter.call = ROOT if parent is None else parent
            call.end = self._tick()
            self._note(call, leaves)
            return out

        return record

    def copying(self, name: str) -> Action:
        """Like `action`, but returns copies of tensors, for the data flow."""
        return self.action(name, copy=True)

    def use(self, parameter: int) -> Use:
        """A use of a parameter at this time."""
        return Use(parameter, tuple(call.number for call in self.active), self.clock)

    def charge(self, work: float) -> None:
        """Count work for all active calls."""
        if self.meter.paused:
            return
        self.work += work
        for call in self.active:
            call.work += work

    def _tick(self) -> int:
        self.clock += 1
        self.meter.time = self.clock
        return self.clock

    def _note(self, call: Call, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._versions.append((call, self._counter(leaf), _version(leaf)))
            elif not isinstance(leaf, _CONSTANTS):
                call.replayable = False
        call.leaves = _describe(leaves)

    def _counter(self, tensor: Tensor) -> Tensor:
        """A tensor that has the same version counter but no memory: the other may be freed."""
        paused, self.meter.paused = self.meter.paused, True
        try:
            counter = tensor.detach()
            counter.data = tensor.new_empty(0)
        except (RuntimeError, NotImplementedError):  # an inference tensor, or a wrapper
            return tensor
        finally:
            self.meter.paused = paused
        return counter

    def close(self) -> None:
        """Detect outputs modified in place."""
        for call, tensor, version in self._versions:
            call.mutated = call.mutated or _version(tensor) != version
        self._versions.clear()


def _version(x: Any) -> int:
    """Version counter of a tensor; inference tensors have none."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _describe(leaves: Sequence[Any]) -> list[Any]:
    return [
        Leaf(tuple(x.shape), None, x.dtype, x.device) if isinstance(x, Tensor) else x
        for x in leaves
    ]


def _merge(few: _Recorder, more: _Recorder, uses: Sequence[Use]) -> Structure:
    """The calls of both passes, at the times of the first, with their batch axes.

    Calls that differ between the passes because the data determines what runs (a mixture of
    experts) are dropped: only the module around them can be replayed or perturbed.
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
    flow = _renumbered(few.meter.flow, few.calls, number)
    calls = []
    for old, new in number.items():
        call, other = few.calls[old], more.calls[same[old]]
        call.number = new
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
    return Structure(calls, kept, few.work, flow)


def _renumbered(flow: Flow, calls: Sequence[Call], number: Mapping[int, int]) -> Flow:
    """The data flow with dropped calls replaced by the calls around them."""
    place = {ROOT: ROOT}
    for call in calls:
        around = ROOT if call.parent is None else place[call.parent]
        place[call.number] = number.get(call.number, around)
    events = [replace(event, call=place[event.call]) for event in flow.events]
    outputs = {s: (number[c], i) for s, (c, i) in flow.outputs.items() if c in number}
    return Flow(events, outputs, flow.parameters, flow.result)


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
