"""Layouts: cached structure of the forward pass per kind of input.

A kind of input is given by its types and numbers of axes, and by the modes of the modules. Sizes
(the length of a sequence) change shapes and work, not the structure: another length of a known kind
takes one pass of two rows, or none if only parameters are perturbed.

Embeddings measure the similarity of points, for the kernel of the Gaussian allocator.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from flops.engine.groups import ResolvedGroup
from flops.errors import BatchError, CoverageError
from flops.estimators.variance import users_frame
from flops.passes.batch import Batch, check_finite
from flops.passes.binding import Binding
from flops.passes.checks import Buffers
from flops.passes.guards import RandomState, check, check_deterministic
from flops.passes.replay import Passes
from flops.passes.structure import FEW, FOLDED, MORE, Call, Leaf, Structure
from flops.passes.trace import inspect, resized
from flops.perturb.activation_checks import check_differentiable

MOST = 256  # a layout is small
ROWS = 256  # more rows in a pass are no faster on a CPU
ROOM = 1 << 28  # bytes that a pass may take for any batch
LARGEST = 3  # largest outputs in memory, twice each: a module's input and output


@dataclass
class Embedding:
    """Observes one call of the clean pass and keeps one vector per point.

    By default the input of the head (the last linear layer that runs), or the output of a module
    chosen by the user. Sequences (B, T, E) are averaged over positions; tensors with more axes are
    flattened, since their position axes are unknown.

    Attributes:
        call: Number of the call.
        position: Index of the leaf in its arguments or output.
        axis: Batch axis of that tensor.
        output: Whether the leaf is in the output.
        value: The vectors of the last clean pass, shape (B, E).
    """

    call: int
    position: int
    axis: int
    output: bool
    value: Tensor = field(default_factory=lambda: torch.empty(0))

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Read the vectors from a call."""
        leaves = tree_flatten(out if self.output else (args, kwargs))[0]
        rows = leaves[self.position].detach().movedim(self.axis, 0).float()
        if rows.dim() == 3:
            rows = rows.mean(1)
        self.value = rows.reshape(len(rows), -1).cpu()  # (B, E)


@dataclass
class Layout:
    """Structure and bindings for one kind of input.

    Attributes:
        structure: Structure of the forward pass.
        bindings: Bindings of the groups' estimators.
        embedding: Embedding of the points, if any.
        single: Whether it was traced with a single point, which cannot show interactions of points.
        needed: Calls whose clean outputs must be recorded.
        rows: Rows in a pass that take little memory.
    """

    structure: Structure
    bindings: list[Binding]
    embedding: Embedding | None
    single: bool

    def __post_init__(self) -> None:
        """Derived values that every step needs."""
        self.needed = frozenset().union(*(binding.needed for binding in self.bindings))
        noise = max((b.noise_size for b in self.bindings), default=0)
        self.rows = _rows_in(ROOM, self.structure, noise)

    def chunk(self, size: int) -> int:
        """Largest number of rows in a pass: the batch size, or more if they take little memory."""
        return min(ROWS, max(size, self.rows))

    def saved_passes(self, groups: Sequence[ResolvedGroup]) -> float:
        """Forward passes that replays save in a step, per point."""
        pairs = zip(self.bindings, groups, strict=True)
        return sum(b.replayed_share * g.queries * g.estimator.work for b, g in pairs)


class Layouts:
    """Finds layouts of a model and its groups; an LRU cache.

    Args:
        model: The model.
        modules: Its modules by name.
        groups: Groups to perturb.
        reuse: Whether prefixes are replayed.
        embedding: Module whose output embeds points; None for the input of the head.
        embed: Whether embeddings are needed.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        groups: Sequence[ResolvedGroup],
        reuse: bool,
        embedding: nn.Module | str | None,
        embed: bool,
    ) -> None:
        self._model, self._modules, self._groups, self._reuse = model, modules, groups, reuse
        self._embedding, self._embed = embedding, embed
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._known: dict[Any, Layout] = {}
        self._kinds: dict[Any, Layout] = {}

    def of(self, groups: Sequence[ResolvedGroup]) -> Layouts:
        """Layouts of the same model with other groups."""
        new = copy.copy(self)
        new._groups, new._known, new._kinds = groups, {}, {}
        return new

    @property
    def latest(self) -> Layout | None:
        """The most recently used layout; None before the first batch."""
        return next(reversed(self._known.values()), None)

    def __getstate__(self) -> dict[str, Any]:
        # Layouts refer to parameters by identity, so a copy finds its own.
        return {**self.__dict__, "_known": {}, "_kinds": {}}

    def find(self, batch: Batch, state: RandomState) -> tuple[Layout, float]:
        """The layout for this kind of input, and the cost of finding it in passes of one row."""
        named = list(self._model.named_parameters())
        trainable = {id(p): n for n, p in named if p.requires_grad}
        before = {n: id(p) for n, p in self._trainable.items()}
        changed = {n for n, _ in before.items() ^ {n: i for i, n in trainable.items()}.items()}
        if changed:
            raise CoverageError(
                f"parameters were frozen, unfrozen or replaced since this ForwardGradient was "
                f"made: {sorted(changed)[:5]}. Make a new one, and load the state_dict of this one."
            )
        modes = tuple(module.training for module in self._modules.values())
        types = tuple((p.dtype, p.device) for _, p in named)
        sizes, kind = ((signature, modes, types) for signature in batch.signatures())
        known = self._known.get(sizes)
        if known and not (known.single and batch.size > 1):
            self._known[sizes] = self._known.pop(sizes)  # LRU
            return known, 0.0
        alike = self._kinds.get(kind)
        layout, cost = None, 0.0
        if alike and not (alike.single and batch.size > 1):
            layout, cost = self._resize(alike, batch, state)
        if layout is None:
            layout, more = self._inspect(batch, state, trainable)
            self._kinds[kind], cost = layout, cost + more
        check()  # an interrupted trial is not a failure: nothing is cached
        if len(self._known) >= MOST:
            self._known.pop(next(iter(self._known)))
        self._known[sizes] = layout
        return layout, cost

    def find_without_stages(
        self, batch: Batch, state: RandomState, error: CoverageError
    ) -> tuple[Layout, float]:
        """Like `find`, with a warning: blocks take the place of stages, which raised the error."""
        try:
            found = self.find(batch, state)
        except CoverageError:
            raise error from None
        warnings.warn(
            "noise goes on the output of every block, which takes more queries, since the "
            f"model cannot be cut into stages: {error}",
            stacklevel=users_frame(),
        )
        return found

    def _inspect(
        self, batch: Batch, state: RandomState, trainable: Mapping[int, str]
    ) -> tuple[Layout, float]:
        buffers = Buffers(self._modules)
        try:
            with torch.no_grad():
                structure = inspect(self._model, self._modules, batch, trainable)
                check_deterministic(state, self._modules)
                buffers.check()
                # Trials of prefixes compare losses, so these must be finite.
                check_finite(structure.losses, "the clean pass", structure.rows)
                passes = Passes(self._model, self._modules, structure, batch)
                bindings = self._bind(passes)
                _check_uses(structure, bindings, trainable)
                for group, binding in zip(self._groups, bindings, strict=True):
                    group.estimator.verify(binding, passes)
                if not _confirmed(passes, bindings):
                    structure.trusted = False  # from here on every prefix is verified by a trial
                    bindings = self._bind(passes)
        except BatchError:  # losses that differ between passes may have a simpler cause
            check_deterministic(state, self._modules)
            buffers.check()
            raise
        finally:
            buffers.restore()
        layout = self._layout(structure, bindings, batch.size == 1)
        return layout, FEW + MORE + passes.trial_cost

    def _resize(
        self, alike: Layout, batch: Batch, state: RandomState
    ) -> tuple[Layout | None, float]:
        """A layout for another length; None if the structure differs."""
        parameters_only = not any(binding.noise_size for binding in alike.bindings)
        if parameters_only and alike.embedding is None:  # shapes do not matter
            return alike, 0.0
        with torch.no_grad():
            structure = resized(alike.structure, self._model, self._modules, batch)
            check_deterministic(state, self._modules)
            if structure is None:
                return None, float(FEW)
            bindings = self._bind(Passes(self._model, self._modules, structure, batch))
        return self._layout(structure, bindings, alike.single), float(FEW)

    def _bind(self, passes: Passes) -> list[Binding]:
        return [group.estimator.bind(group, passes, self._reuse) for group in self._groups]

    def _layout(self, structure: Structure, bindings: list[Binding], single: bool) -> Layout:
        found = None
        if self._embed or self._embedding is not None:
            found = find_embedding(structure, self._modules, self._embedding)
        return Layout(structure, bindings, found, single)


def _confirmed(passes: Passes, bindings: Sequence[Binding]) -> bool:
    """Check the targets' graphs, and verify the shortest, longest and median prefix by trials.

    The data flow does not show side effects in Python, such as counting calls.
    """
    prefixes = [prefix for binding in bindings for prefix in binding.prefixes if prefix.replayed]
    inside = passes.structure.inside
    prefixes.sort(key=lambda prefix: len(inside(call.number for call in prefix.replayed)))
    places = sorted({0, len(prefixes) // 2, len(prefixes) - 1}) if prefixes else []
    tried = [prefixes[place] for place in places]
    if not tried and not any(binding.local for binding in bindings):
        return True
    wanted = frozenset().union(*(prefix.needed for prefix in tried))
    record = check_differentiable(passes, bindings, wanted)
    return all(passes.holds(prefix, record) for prefix in tried)


def _rows_in(room: int, structure: Structure, noise: int) -> int:
    """Largest power of two of rows that fit into ``room`` bytes."""
    sizes = sorted(
        (sum(leaf.row_bytes for _, leaf in call.tensors) for call in structure.calls), reverse=True
    )
    row = 2 * sum(sizes[:LARGEST]) + 3 * 4 * noise  # drawn, signed, and added
    return 1 << (max(2, room // max(row, 1)).bit_length() - 1)


def _check_uses(
    structure: Structure, bindings: Sequence[Binding], trainable: Mapping[int, str]
) -> None:
    for use in structure.uses:
        if not any(binding.covers(use) for binding in bindings):
            where = [structure.calls[c].name for c in use.calls if structure.calls[c].name]
            place = f"inside '{where[-1]}'" if where else "in the model's own forward"
            place = place if use.calls else "in the loss function"
            raise CoverageError(
                f"parameter '{trainable[use.parameter]}' is also used {place}, which lies in "
                "no group: its gradient would miss that use. Add that module to a group, or "
                "give the parameter as Group(parameters=[...], estimator=SPSA(shared=True))."
            )


def find_embedding(
    structure: Structure, modules: Mapping[str, nn.Module], wanted: nn.Module | str | None
) -> Embedding | None:
    """The tensor of a forward pass to use as embedding; None if there is no suitable one.

    Raises:
        CoverageError: If the wanted module is unknown, never runs or returns nothing per point.
    """
    if wanted is None:
        heads = [c for c in structure.calls if isinstance(modules[c.name], nn.Linear)]
        for call in sorted(heads, key=lambda c: c.end, reverse=True):
            found = _fitting(call.inputs)
            if found is not None:
                return Embedding(call.number, *found, output=False)
        return None
    names = [n for n, m in modules.items() if m is wanted or n == wanted]
    if not names:
        raise CoverageError(f"embedding: {wanted!r} is not a module of the model")
    calls: list[Call] = structure.of(names[0])
    found = _fitting(calls[-1].leaves) if calls else None
    if found is None:
        raise CoverageError(f"embedding: '{names[0]}' never runs, or returns nothing per point")
    return Embedding(calls[-1].number, *found, output=True)


def _fitting(leaves: list[Any]) -> tuple[int, int] | None:
    for position, leaf in enumerate(leaves):
        floating = isinstance(leaf, Leaf) and leaf.dtype.is_floating_point
        if floating and leaf.axis is not None and leaf.axis != FOLDED and len(leaf.shape) > 1:
            return position, leaf.axis
    return None
