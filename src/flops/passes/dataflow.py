"""Data flow of a forward pass: which tensors each operation reads, and where they came from.

A prefix is replayed by returning recorded outputs instead of running their modules. Which outputs
the rest of the pass reads, and whether a skipped module leaves anything else behind for it, follows
from one observed pass:

- Memory is followed by storage, so views need no care. A call returns copies of its tensors during
  the observed pass: whoever reads such a copy reads the output, and whoever reads another storage
  that was written inside the call reads something it left behind (an attribute, a cache).
- An operation that hands values to Python (``item``, ``nonzero``) may decide what runs next, so
  that other rows may read what these did not.
- Numpy and C read and write memory unseen. They show in tensors that no operation wrote: whatever
  such code could have read is taken as read.
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
# Values go to Python, or decide the shape of the result.
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
# Methods of a tensor that show its memory to somebody who is not torch.
_EXPOSE = {"numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "untyped_storage", "storage"}
_UNWRITTEN = ("empty", "new_empty")  # memory without values
_NO_VALUES = ("_like", "new_")  # take a tensor for its shape and type alone


@dataclass(frozen=True)
class Event:
    """One operation: the innermost call around it, its moment, and the storages it touches.

    Attributes:
        call: Number of the innermost active call, ROOT outside of all.
        time: Clock of the structure.
        reads: Storages whose values it reads, those that it writes in place included.
        writes: Storages that it writes, made by it or not.
        floating: Those of the written ones that hold floating-point values.
        host: Whether it hands floating-point values, or what was computed of some, to Python.
        hidden: Whether it reads what no operation wrote.
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
    """What a replay of some calls needs.

    Attributes:
        read: Replayed calls whose outputs the rest of the pass reads.
        leaks: Replayed calls that leave something else behind that it reads.
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
        """What is read of some calls if the rest of the pass runs.

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
                continue  # only replayed calls take what it computes
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
        """Whether parameters act on the rest of the pass otherwise than through some outputs.

        Args:
            span: First moment of the pass at which the parameters act, and the end of that.
            parameters: Their ``id``.
            allowed: Call and position of the outputs.

        Returns:
            None if the data flow is hidden inside of the span.
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
    """Observes one pass; enter it around the pass, and tell it of every call's output.

    Args:
        known: Tensors that exist before the pass: parameters, buffers, inputs, targets.
        parameters: Trainable parameters.
    """

    def __init__(self, known: Iterable[Any], parameters: Iterable[Tensor]) -> None:
        self.flow = Flow()
        self.call, self.time = ROOT, 0  # kept by whoever follows the calls
        self.strangers: set[int] = set()
        self._refs: dict[int, StorageWeakRef] = {}  # they keep an address from being used again
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
        """Observe from here on."""
        self._entered = ExitStack()
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop."""
        self._entered.close()

    def copied(self, number: int, leaves: Sequence[Any]) -> list[Any]:
        """The output of a call as copies, by which its readers are told apart."""
        self.paused = True  # the copies are no work of the model's
        try:
            return [self._copy(number, place, leaf) for place, leaf in enumerate(leaves)]
        finally:
            self.paused = False

    def _copy(self, number: int, place: int, leaf: Any) -> Any:
        old = self._storage(leaf)
        if old is None or isinstance(leaf, torch.nn.Parameter):
            return leaf  # a parameter stays one, for whoever looks where it is used
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
        """An operation."""
        if self.paused:
            return
        packet = func._overloadpacket
        name = packet.__name__
        given = self._storages(tree_flatten((args, kwargs))[0])
        made = self._storages(tree_flatten(out)[0])
        if name.startswith("lift_fresh"):  # from Python: a constant, unless values went there
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
        """Somebody who is not torch looks at the memory of a tensor."""
        storage = None if self.paused else self._storage(tensor)
        if storage is not None:
            host = storage in self._floats
            self.flow.events.append(Event(self.call, self.time, (storage,), (), frozenset(), host))

    def end(self, losses: Tensor) -> None:
        """What the pass was made for."""
        self.flow.result = frozenset(self._storages([losses]))

    def settle(self, other: FlowMeter) -> None:
        """What another pass saw as well was there before both, and hides nothing."""
        constant = self.strangers & other.strangers
        self.flow.events = [
            event
            if not event.hidden
            else _with_hidden(event, any(s in self.strangers - constant for s in event.reads))
            for event in self.flow.events
        ]

    def _hides(self, storage: int) -> bool:
        """Whether no operation wrote it: then it came from outside of torch."""
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
    """Arguments that an operation writes into."""
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
