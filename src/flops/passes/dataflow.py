"""Data flow of a forward pass: which tensors each operation reads, and where they came from.

A prefix is replayed by returning recorded outputs instead of running their modules. One observed
pass shows which outputs the rest of the pass reads, and whether a skipped module has side effects:

- Memory is identified by storage, so views need no special care. During the observed pass a call
  returns copies of its tensors: reading such a copy is reading the output, and reading another
  storage that was written inside the call is reading a side effect (an attribute, a cache).
- An operation that passes values to Python (``item``, ``nonzero``) may control what runs next, so
  other rows may read other outputs.
- Numpy and C access memory unobserved. They show in tensors that no operation wrote: everything
  that such code could have read counts as read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ROOT = -1  # "call" of what runs outside of all modules, such as the loss function
_aten = torch.ops.aten
# Values go to Python, or determine the shape of the result.
_TO_HOST = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
}
# Methods of a tensor that expose its memory outside of torch.
_EXPOSE = {"numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "untyped_storage", "storage"}
_UNWRITTEN = ("empty", "new_empty")  # memory without values
_NO_VALUES = ("_like", "new_")  # read only the shape and type of a tensor


@dataclass(frozen=True)
class Event:
    """One operation: the innermost call around it, its time, and the storages it accesses.

    Attributes:
        call: Number of the innermost active call, ROOT outside of all.
        time: Clock of the structure.
        reads: Storages whose values it reads, including those it writes in place.
        writes: Storages that it writes, new or not.
        floating: Those of the written ones that hold floating-point values.
        host: Whether it passes values that depend on floating-point values to Python.
        hidden: Whether it reads memory that no operation wrote.
    """

    call: int
    time: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    floating: frozenset[int]
    host: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Replay:
    """Requirements of a replay of some calls.

    Attributes:
        read: Replayed calls whose outputs the rest of the pass reads.
        leaks: Replayed calls with side effects that it reads.
        sure: False if the pass hides a part of its data flow, or other rows may read more.
    """

    read: frozenset[int]
    leaks: frozenset[int]
    sure: bool


@dataclass
class Flow:
    """The operations of a pass in order, and the outputs of its calls, by storage."""

    events: list[Event] = field(default_factory=list)
    outputs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Call and position in its output, by storage."""
    parameters: dict[int, int] = field(default_factory=dict)
    """``id`` of the parameter, by storage."""
    result: frozenset[int] = frozenset()
    """Storages of the losses."""

    def replay(self, replayed: Iterable[int], inside: Mapping[int, int]) -> Replay:
        """Outputs and side effects of replayed calls that the rest of the pass reads.

        Args:
            replayed: Outermost calls that do not run.
            inside: For every call that does not run, the replayed one around it (or itself).
        """
        chosen = set(replayed)
        wrote: dict[int, set[int]] = {}
        for event in self.events:
            if event.call in inside:
                for storage in event.writes:
                    if storage not in self.outputs:
                        wrote.setdefault(storage, set()).add(inside[event.call])
        read: set[int] = set()
        leaks: set[int] = set()
        wanted, sure = set(self.result), True
        for event in reversed(self.events):
            if event.call in inside:
                continue
            unsure = event.host or event.hidden
            if not unsure and wanted.isdisjoint(event.writes):
                continue  # only replayed calls read what it computes
            sure = sure and not unsure
            wanted.update(event.reads)
            for storage in event.reads:
                owner = self.outputs.get(storage, (ROOT, 0))[0]
                if owner in chosen:
                    read.add(owner)
                elif owner in inside:
                    leaks.add(inside[owner])
                leaks |= wrote.get(storage, set())
        return Replay(frozenset(read), frozenset(leaks), sure)

    def escapes(
        self, span: tuple[int, int], parameters: Iterable[int], allowed: Iterable[tuple[int, int]]
    ) -> bool | None:
        """Whether parameters affect the rest of the pass other than through the allowed outputs.

        Args:
            span: First and last time of the pass at which the parameters are used.
            parameters: Their ``id``.
            allowed: Call and position of the outputs.

        Returns:
            None if the data flow inside the span is hidden.
        """
        start, end = span
        wanted, through = set(parameters), set(allowed)
        moved = {s for s, parameter in self.parameters.items() if parameter in wanted}
        known = set(moved)
        unsure = False
        for event in self.events:
            if start <= event.time < end:
                if not known.isdisjoint(event.reads):
                    known |= event.floating
                    unsure = unsure or event.host
                unsure = unsure or event.hidden
        left = {s for s in known - moved if self.outputs.get(s) not in through}
        for event in self.events:
            if not start <= event.time < end and not left.isdisjoint(event.reads):
                return True
        return None if unsure else False


class FlowMeter:
    """Context manager that observes one pass; call `copied` on every call's output.

    Args:
        known: Tensors that exist before the pass: parameters, buffers, inputs, targets.
        parameters: Trainable parameters.
    """

    def __init__(self, known: Iterable[Any], parameters: Iterable[Tensor]) -> None:
        self.flow = Flow()
        self.call, self.time = ROOT, 0  # set by the recorder of the calls
        self.strangers: set[int] = set()
        self._refs: dict[int, StorageWeakRef] = {}  # prevent reuse of an address
        self._written: set[int] = set()
        self._floats: set[int] = set()
        self.paused = False
        for tensor in known:
            storage = self._storage(tensor)
            if storage is not None:
                self._written.add(storage)
                if tensor.is_floating_point():
                    self._floats.add(storage)
        for parameter in parameters:
            storage = self._storage(parameter)
            if storage is not None:
                self.flow.parameters[storage] = id(parameter)
        self._modes = (_Operations(self), _Methods(self))

    def __enter__(self) -> FlowMeter:
        """Start observing."""
        self._entered = ExitStack()
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop observing."""
        self._entered.close()

    def copied(self, number: int, leaves: Sequence[Any]) -> list[Any]:
        """Copies of a call's output, which identify reads of it."""
        self.paused = True  # copies are not operations of the model
        try:
            return [self._copy(number, place, leaf) for place, leaf in enumerate(leaves)]
        finally:
            self.paused = False

    def _copy(self, number: int, place: int, leaf: Any) -> Any:
        old = self._storage(leaf)
        if old is None or isinstance(leaf, torch.nn.Parameter):
            return leaf  # a parameter stays the same object, for `UseMeter`
        copy = leaf.clone()
        new = self._storage(copy)
        if new is None:
            return leaf
        self.flow.outputs[new] = (number, place)
        floating = frozenset([new]) if leaf.is_floating_point() else frozenset()
        hidden = self._hides(old)
        self.flow.events.append(Event(number, self.time, (old,), (new,), floating, hidden=hidden))
        self._written.add(new)
        if old in self._floats:
            self._floats.add(new)
        return copy

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operation."""
        if self.paused:
            return
        packet = func._overloadpacket
        name = packet.__name__
        given = self._storages(tree_flatten((args, kwargs))[0])
        made = self._storages(tree_flatten(out)[0])
        if name.startswith(
            "lift_fresh"
        ):  # from Python: a constant, unless values were passed to Python
            if not any(event.host for event in self.flow.events):
                self._written |= given.keys() | made.keys()
            return
        if func.is_view:
            return
        reads = () if any(part in name for part in _NO_VALUES) else tuple(given)
        changed = self._storages(_changed(func, args, kwargs))
        writes = {**made, **changed}
        floats = not self._floats.isdisjoint(given)
        hidden = any([self._hides(s) for s in reads if s not in changed])
        host = packet in _TO_HOST and floats
        floating = frozenset(s for s, tensor in writes.items() if tensor.is_floating_point())
        if not any(name == part or name.startswith(f"{part}_") for part in _UNWRITTEN):
            self._written |= writes.keys()
        if floats:
            self._floats |= writes.keys()
        self.flow.events.append(
            Event(self.call, self.time, reads, tuple(writes), floating, host, hidden)
        )

    def expose(self, tensor: Tensor) -> None:
        """Record that code outside of torch accesses the memory of a tensor."""
        storage = None if self.paused else self._storage(tensor)
        if storage is not None:
            host = storage in self._floats
            self.flow.events.append(Event(self.call, self.time, (storage,), (), frozenset(), host))

    def end(self, losses: Tensor) -> None:
        """Record the result of the pass."""
        self.flow.result = frozenset(self._storages([losses]))

    def settle(self, other: FlowMeter) -> None:
        """Mark unknown storages that another pass read, too, as constants: these hide nothing."""
        constant = self.strangers & other.strangers
        self.flow.events = [
            event
            if not event.hidden
            else _with_hidden(event, any(s in self.strangers - constant for s in event.reads))
            for event in self.flow.events
        ]

    def _hides(self, storage: int) -> bool:
        """Whether no operation wrote it, so that it came from outside of torch."""
        if storage in self._written:
            return False
        self.strangers.add(storage)
        return True

    def _storages(self, leaves: Iterable[Any]) -> dict[int, Tensor]:
        found = {}
        for leaf in leaves:
            storage = self._storage(leaf)
            if storage is not None:
                found[storage] = leaf
        return found

    def _storage(self, tensor: Any) -> int | None:
        if not isinstance(tensor, Tensor):
            return None
        paused, self.paused = self.paused, True
        try:
            ref = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper without memory
            return None
        finally:
            self.paused = paused
        return int(self._refs.setdefault(ref.cdata, ref).cdata)


def _with_hidden(event: Event, hidden: bool) -> Event:
    return Event(
        event.call, event.time, event.reads, event.writes, event.floating, event.host, hidden
    )


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an operation modifies in place."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tree_flatten(value)[0]
    return found


class _Operations(TorchDispatchMode):
    def __init__(self, meter: FlowMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._meter.see(func, args, kwargs or {}, out)
        return out


class _Methods(TorchFunctionMode):
    def __init__(self, meter: FlowMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _EXPOSE and args and isinstance(args[0], Tensor):
            self._meter.expose(args[0])
        return func(*args, **(kwargs or {}))
