"""Intercepted passes: calls of modules run an action, and a prefix of the pass is replayed.

Replay, noise, recording and local VJPs are all *actions* on single calls. An action receives the
module's own forward and the arguments of the call. Only the ``forward`` attribute of the instance
is replaced, so hooks of the user run as in any pass.

Prefix reuse: modules before the noise are computed once, and replayed for every row. A *prefix* is
the set of outermost calls that end before some time of the forward pass. A pass from a prefix runs
the model's own code, but these calls return the outputs recorded in the clean pass, so skip
connections, masks and keyword arguments need no special care. Only outputs that the rest of the
pass reads are recorded, according to the data flow (`flops.passes.dataflow`); the others are
placeholders of NaN without memory. Calls with side effects are not replayed. If a model hides its
data flow (numpy, C, branches that depend on values), all outputs are recorded, and a trial with a
few rows checks the replay. If a later batch uses a placeholder, its loss is NaN, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import FlopsError
from flops.passes.batch import Batch, See
from flops.passes.guards import INTERCEPTED, check
from flops.passes.structure import FEW, MORE, Call, Leaf, Structure

Forward = Callable[..., Any]
Action = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
Actions = Mapping[str, Sequence[Action | None]]
"""Actions of a module's calls in order, by its name; None runs the module unchanged."""

Record = Mapping[int, list[Any]]
"""Recorded leaves of a call's output, by call number."""

Edit = Callable[[Any], Any]
"""Changes the output of a call, for example by adding noise."""

_MISSING = object()


class Watch(Protocol):
    """Observes one call of the clean pass."""

    @property
    def call(self) -> int: ...  # noqa: D102

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None: ...  # noqa: D102


class Leave(BaseException):
    """Raised by an action to stop a forward pass early; not meant to be caught by user code."""


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], actions: Actions) -> Iterator[None]:
    """Run the actions in the enclosed forward pass; the modules are restored afterwards."""
    check()
    saved: list[tuple[nn.Module, Any]] = []
    try:
        for name, of_module in actions.items():
            module = modules[name]
            saved.append((module, module.__dict__.get("forward", _MISSING)))
            module.__dict__["forward"] = _intercepted(name, module.forward, of_module)
        yield
    finally:
        for module, forward in reversed(saved):
            if forward is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _intercepted(name: str, original: Forward, actions: Sequence[Action | None]) -> Forward:
    remaining = iter(actions)

    def forward(*args: Any, **kwargs: Any) -> Any:
        check()
        try:
            action = next(remaining)
        except StopIteration:
            raise FlopsError(
                f"module '{name}' was called more often ({len(actions) + 1} times) than when its "
                "forward pass was traced: the model's control flow depends on the data. Give an "
                "enclosing module as the target."
            ) from None
        if action is None:
            return original(*args, **kwargs)
        return action(original, args, kwargs)

    forward.__dict__[INTERCEPTED] = True
    return forward


def everywhere(wrap: Callable[[str], Action], modules: Mapping[str, nn.Module]) -> Actions:
    """One action per module, used for all of its calls."""
    return {name: _Endless(wrap(name)) for name in modules}


class _Endless(Sequence[Action]):
    """The same action for any number of calls."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def __getitem__(self, index: Any) -> Any:
        return self._action

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class Prefix:
    """Calls that are replayed, calls that must be recorded, and calls that still run."""

    replayed: tuple[Call, ...]
    needed: frozenset[int]
    visible: Mapping[str, tuple[int, ...]]
    share: float

    def actions(self, action: Callable[[int], Action | None]) -> dict[str, list[Action | None]]:
        """Actions of the visible calls, for modules with at least one."""
        found = {}
        for name, numbers in self.visible.items():
            actions = [action(number) for number in numbers]
            if any(a is not None for a in actions):
                found[name] = actions
        return found


def finished(structure: Structure, time: int, barred: frozenset[int] = frozenset()) -> list[Call]:
    """The outermost replayable calls that end at or before a time."""
    chosen: list[Call] = []
    inside: set[int] = set()
    for call in structure.calls:  # parents come before their children
        if call.parent in inside:
            inside.add(call.number)
        elif call.end <= time and call.replayable and call.number not in barred:
            chosen.append(call)
            inside.add(call.number)
    return chosen


def empty_prefix(structure: Structure) -> Prefix:
    """The empty prefix: every call runs."""
    return Prefix((), frozenset(), visible_calls(structure, frozenset()), 0.0)


def visible_calls(structure: Structure, replayed: frozenset[int]) -> dict[str, tuple[int, ...]]:
    """Calls that are not inside a replayed one, by module."""
    visible: dict[str, list[int]] = {}
    hidden: set[int] = set()
    for call in structure.calls:
        if call.parent is not None and (call.parent in hidden or call.parent in replayed):
            hidden.add(call.number)
        else:
            visible.setdefault(call.name, []).append(call.number)
    return {name: tuple(numbers) for name, numbers in visible.items()}


class Passes:
    """Intercepted forward passes of one model over one batch."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        structure: Structure,
        batch: Batch,
    ) -> None:
        self.model, self.modules, self.structure, self.batch = model, modules, structure, batch
        self.trial_cost = 0.0  # cost of trials, in passes of one row

    def clean(
        self,
        wanted: Iterable[int],
        watch: Watch | None = None,
        rows: Tensor | None = None,
        around: Mapping[int, Action] | None = None,
        see: See | None = None,
    ) -> tuple[Tensor, Record]:
        """The noise-free pass: one loss per point, and the outputs of the wanted calls.

        Args:
            wanted: Numbers of calls to record.
            watch: Called with the arguments and the output of one call.
            rows: Points to run, at least two; None for all.
            around: Actions of calls, which must not change their outputs.
            see: Called with the outputs of the model.
        """
        calls, record = self.structure.calls, {}
        wanted, around = set(wanted), around or {}

        def keep(number: int) -> Action | None:
            watched, instead = watch is not None and watch.call == number, around.get(number)
            if number not in wanted and not watched:
                return instead

            def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if instead is None:
                    out = forward(*args, **kwargs)
                else:
                    out = instead(forward, args, kwargs)
                if watch is not None and watched:
                    watch.see(args, kwargs, out)
                if number not in wanted:
                    return out
                leaves = tree_flatten(out)[0]
                if calls[number].mutated:
                    leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                record[number] = leaves
                return out

            return action

        # One-row kernels round differently, so a batch of one runs as two equal rows. Rows are
        # copies: a model that modifies its input must not change that of the queries.
        size = self.batch.size if rows is None else len(rows)
        if rows is None:
            rows = torch.arange(size) if size > 1 else torch.zeros(2).long()
        with intercepted(self.modules, empty_prefix(self.structure).actions(keep)):
            losses = self.batch.losses(self.model, rows, see, self.structure.saving)
        return losses[:size], record

    def run(
        self,
        prefix: Prefix,
        record: Record,
        rows: Tensor,
        *,
        edits: Mapping[int, Edit] | None = None,
        around: Mapping[int, Action] | None = None,
        places: Tensor | None = None,
        see: See | None = None,
    ) -> Tensor:
        """Losses of the rows, starting from the prefix.

        Args:
            prefix: Calls to replay.
            record: Outputs of the prefix's needed calls.
            rows: Points of the batch to run.
            edits: Changes to the outputs of calls, replayed or not.
            around: Actions of other calls.
            places: Positions of the rows in the record, if not the points themselves.
            see: Called with the outputs of the model.
        """
        edits, around = edits or {}, around or {}
        places = rows if places is None else places
        replayed = {call.number: call for call in prefix.replayed}

        def action(number: int) -> Action | None:
            edit = edits.get(number)
            if number in replayed:
                return _replay(replayed[number], record.get(number), places, edit)
            if edit is not None:
                return _edited(edit)
            return around.get(number)

        with intercepted(self.modules, prefix.actions(action)):
            return self.batch.losses(self.model, rows, see, self.structure.saving)

    def prefix(self, time: int, keep: frozenset[int] = frozenset()) -> Prefix:
        """The prefix of all calls that end at or before a time.

        Args:
            time: Clock of the structure.
            keep: Calls that are always recorded, because they are edited.
        """
        structure = self.structure
        barred: frozenset[int] = frozenset()
        while True:
            replayed = finished(structure, time, barred)
            numbers = frozenset(call.number for call in replayed)
            found = structure.flow.replay(numbers, structure.inside(numbers))
            if not found.leaks:
                break
            barred |= found.leaks
        # Integers cannot be NaN, and a tensor without batch axis is small: always recorded.
        solid = {
            call.number
            for call in replayed
            if any(
                not leaf.dtype.is_floating_point or leaf.axis is None for _, leaf in call.tensors
            )
        }
        sure = found.sure and structure.trusted
        needed = found.read | solid | (keep & numbers) if sure else numbers
        visible = visible_calls(structure, numbers)
        prefix = Prefix(tuple(replayed), needed, visible, structure.share(replayed))
        if not sure and replayed:
            if time not in structure.verified:
                structure.verified[time] = self.holds(prefix, self.recorded(prefix.needed))
            if not structure.verified[time]:
                return empty_prefix(structure)  # a module has side effects
        return prefix

    def recorded(self, wanted: Iterable[int], around: Mapping[int, Action] | None = None) -> Record:
        """Outputs of some calls in a pass of the first traced rows; see `holds`."""
        self.trial_cost += FEW
        with torch.no_grad():
            return self.clean(wanted, rows=self.structure.rows[:FEW], around=around)[1]

    def holds(self, prefix: Prefix, record: Record) -> bool:
        """Whether losses are the same with a prefix replayed.

        Rows are in another order than in the recorded pass, so that a side effect of a skipped
        module (an attribute, a cache) does not match them, and changes the losses.
        """
        places = torch.arange(FEW).flip(0)
        losses = self.trial(prefix, record, places)
        return losses is not None and self.structure.agrees(losses, places)

    def trial(
        self,
        prefix: Prefix,
        record: Record,
        places: Tensor,
        *,
        edits: Mapping[int, Edit] | None = None,
        around: Mapping[int, Action] | None = None,
    ) -> Tensor | None:
        """Losses of a few of the traced rows; None if the pass fails."""
        self.trial_cost += len(places) * (1 - prefix.share)
        rows = self.structure.rows[places]
        try:
            return self.run(prefix, record, rows, edits=edits, around=around, places=places)
        except Exception:  # user code that fails on NaN or another shape
            return None

    def rows_are_independent(self, perturb: Callable[[Tensor], dict[str, Any]]) -> bool:
        """Whether noise in one row does not change losses of other rows.

        This holds for outputs with a batch axis. An output without one is expanded over the rows to
        be perturbed: the model must then broadcast it row by row.

        Args:
            perturb: Keyword arguments of `run`, given the noise scale of each row.
        """
        whole, places, one = empty_prefix(self.structure), torch.arange(MORE), torch.ones(MORE)
        first = self.trial(whole, {}, places, **perturb(one))
        second = self.trial(whole, {}, places, **perturb(one + (places == 0)))
        if first is None or second is None:
            return False
        return torch.allclose(first[1:], second[1:], rtol=1e-5, atol=1e-6)


def _replay(call: Call, recorded: list[Any] | None, rows: Tensor, edit: Edit | None) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = []
        for i, leaf in enumerate(call.leaves):
            if not isinstance(leaf, Leaf):
                values.append(leaf)
            elif recorded is None:
                values.append(_placeholder(leaf, len(rows)))
            elif leaf.axis is None:
                values.append(recorded[i].clone() if call.mutated else recorded[i])
            else:
                values.append(recorded[i].index_select(leaf.axis, rows.to(leaf.device)))
        assert call.spec is not None
        out = tree_unflatten(values, call.spec)
        return out if edit is None else edit(out)

    return action


def _edited(edit: Edit) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return edit(forward(*args, **kwargs))

    return action


def _placeholder(leaf: Leaf, rows: int) -> Tensor:
    shape = [rows if dim == leaf.axis else size for dim, size in enumerate(leaf.shape)]
    return torch.full((), torch.nan, dtype=leaf.dtype, device=leaf.device).expand(shape)
