"""Layouts: what is found out about a model once per kind of input, and kept.

A kind of input is its shapes and types but for the batch size, with the modes of the modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flops.engine.groups import ResolvedGroup
from flops.errors import BatchError, CoverageError
from flops.estimators.base import Binding
from flops.passes.batch import Batch
from flops.passes.checks import Buffers, RandomState, check_deterministic, check_finite
from flops.passes.embedding import Embedding, find_embedding
from flops.passes.interrupts import check
from flops.passes.replay import Passes
from flops.passes.structure import FEW, MORE, Structure, inspect

MOST = 256  # a layout is small: the outputs of its few rows are let go


@dataclass
class Layout:
    """What is known about one kind of input.

    ``alone`` if it was seen with a single point, which cannot show whether points mix.
    """

    structure: Structure
    bindings: list[Binding]
    embedding: Embedding | None
    alone: bool

    @property
    def needed(self) -> frozenset[int]:
        """Calls whose clean outputs must be recorded."""
        return frozenset().union(*(binding.needed for binding in self.bindings))

    @property
    def noise(self) -> int:
        """Most noise values on the outputs of a row."""
        return max((b.noise_size for b in self.bindings), default=0)


class Layouts:
    """Finds layouts of a model and its groups, and keeps the latest.

    Args:
        model: The model.
        modules: Its modules by name.
        groups: What is perturbed.
        reuse: Whether prefixes are replayed.
        embedding: Module to embed points by; None for the input of the head.
        embed: Whether embeddings are wanted at all.
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

    @property
    def latest(self) -> Layout | None:
        """The layout that was used last; None before the first batch."""
        return next(reversed(self._known.values()), None)

    def __getstate__(self) -> dict[str, Any]:
        # Layouts know parameters by their identity, which no copy shares: it finds its own.
        return {**self.__dict__, "_known": {}}

    def find(self, batch: Batch, state: RandomState) -> tuple[Layout, int]:
        """The layout for this kind of input, and how many rows it took to find out."""
        trainable = {id(p): n for n, p in self._model.named_parameters() if p.requires_grad}
        before = {n: id(p) for n, p in self._trainable.items()}
        changed = {n for n, _ in before.items() ^ {n: i for i, n in trainable.items()}.items()}
        if changed:
            raise CoverageError(
                f"parameters were frozen, unfrozen or replaced since this ForwardGradient was "
                f"made: {sorted(changed)[:5]}. Make a new one, and load the state_dict of this one."
            )
        modes = tuple(module.training for module in self._modules.values())
        kinds = tuple((p.dtype, p.device) for p in self._model.parameters())
        key = (batch.signature(), modes, kinds)
        known = self._known.get(key)
        if known and not (known.alone and batch.size > 1):
            self._known[key] = self._known.pop(key)  # the latest used is the last to go
            return known, 0
        layout, rows = self._inspect(batch, state, trainable)
        check()  # a trial that a signal ended is no failed one: nothing is kept
        if len(self._known) >= MOST:
            self._known.pop(next(iter(self._known)))
        self._known[key] = layout
        return layout, rows

    def _inspect(
        self, batch: Batch, state: RandomState, trainable: Mapping[int, str]
    ) -> tuple[Layout, int]:
        buffers = Buffers(self._modules)
        try:
            with torch.no_grad():
                structure = inspect(self._model, self._modules, batch, trainable)
                check_deterministic(state, self._modules)
                buffers.check()
                # A trial of what can be reused compares losses, so they must be numbers.
                check_finite(structure.losses, "the clean pass", structure.rows)
                passes = Passes(self._model, self._modules, structure, batch)
                bindings = [g.estimator.bind(g, passes, self._reuse) for g in self._groups]
        except BatchError:  # losses that differ from pass to pass may have a simpler cause
            check_deterministic(state, self._modules)
            buffers.check()
            raise
        finally:
            buffers.restore()
        _check_uses(structure, bindings, trainable)
        structure.outputs = {}
        found = None
        if self._embed or self._embedding is not None:
            found = find_embedding(structure, self._modules, self._embedding)
        layout = Layout(structure, bindings, found, batch.size == 1)
        return layout, FEW + MORE + passes.trials * MORE


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
