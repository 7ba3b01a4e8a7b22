"""Phase 2 of a step: gradients are added to ``.grad``, and post-accumulate hooks are called.

Without hooks, nothing is written before all gradients are known, so that an error leaves everything
unchanged. `Tensor.register_post_accumulate_grad_hook` is PyTorch's convention for stepping an
optimizer as gradients appear: with such hooks every parameter is written, and its hooks are called,
as soon as its gradient is complete and no later pass reads it.

A gradient given by keys and scalars is generated where it is stored; an `Update` receives it in
that form instead of ``.grad``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flops.passes.guards import RandomState
from flops.passes.local_vjp import Gradients, add_gradients, inner
from flops.passes.structure import Structure
from flops.perturb.draws import Draws

Span = tuple[int, int]
"""First and last time of a future pass, by the clock of the structure."""

Update = Callable[[str, Draws], float]
"""Receives a group's gradient instead of ``.grad``; returns its squared norm."""


class Writer:
    """Writes the gradients of all groups of a step.

    Args:
        groups: Parameters of each group.
        spans: Pass of each group's local VJPs; None for none.
        structure: Structure of the forward pass, with the uses of parameters.
        update: Receives the gradients instead of ``.grad``.

    Attributes:
        streaming: Whether parameters are written before all gradients are known.
        seeded: Whether gradients are needed as keys and scalars.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[nn.Parameter]],
        spans: Mapping[str, Span | None],
        structure: Structure,
        update: Update | None = None,
    ) -> None:
        self._update, self.seeded = update, update is not None
        self._expected = Counter(p for parameters in groups.values() for p in parameters)
        self.streaming = update is not None or any(_hooks(p) for p in self._expected)
        self._spans = {name: span for name, span in spans.items() if span is not None}
        self._times: dict[int, list[int]] = {}
        if self.streaming:
            for use in structure.uses:
                self._times.setdefault(use.parameter, []).append(use.time)
        self._staged: Gradients = {}
        self._own: set[nn.Parameter] = set()  # staged without other references
        self._waiting: list[nn.Parameter] = []
        self._written: set[nn.Parameter] = set()
        self._random: RandomState | None = None

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's complete gradient of a parameter."""
        if not self.streaming:
            add_gradients(self._staged, {parameter: gradient})
            return
        _accumulate(parameter, gradient)
        self._written.add(parameter)

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's complete gradient as keys and scalars; returns its squared norm."""
        if self._update is not None:
            return self._update(group, draws)
        total = 0.0
        for parameter, gradient, energy in draws.gradients():
            total += energy
            if self.streaming:
                _accumulate(parameter, gradient, own=True)
                self._written.add(parameter)
                del gradient  # the hooks may free it
                self.done([parameter])
            else:
                add_gradients(self._staged, {parameter: gradient})
                self._own.add(parameter)
        return total

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """A group's gradients of these parameters are complete."""
        if not self.streaming:
            return
        self._expected.subtract(parameters)
        # As in a backward pass, parameters without a gradient call no hooks.
        ready = [p for p in parameters if self._expected[p] == 0 and p in self._written]
        self._waiting += ready
        for parameter in [p for p in self._waiting if not self._read_later(p)]:
            self._waiting = [p for p in self._waiting if p is not parameter]
            self._call_hooks(parameter)

    def passed(self, group: str, time: int | None) -> None:
        """The group's local pass has reached a time; None when it has ended."""
        if time is None:
            self._spans.pop(group, None)
        elif group in self._spans:
            self._spans[group] = (time, self._spans[group][1])

    def commit(self) -> None:
        """Write the remaining gradients."""
        while self._staged:  # one by one, so that only one gradient exists twice at a time
            parameter, gradient = self._staged.popitem()
            _accumulate(parameter, gradient, own=parameter in self._own)
        while self._waiting:
            self._call_hooks(self._waiting.pop())
        if self._random is not None:
            self._random.restore()

    def _call_hooks(self, parameter: nn.Parameter) -> None:
        """Call them as autograd does, with a random state separate from the model's."""
        outside = RandomState()
        if self._random is not None:
            self._random.restore()
        try:
            with torch.no_grad():
                for hook in list((_hooks(parameter) or {}).values()):
                    hook(parameter)
            self._random = RandomState()
        finally:
            outside.restore()

    def _read_later(self, parameter: nn.Parameter) -> bool:
        times = self._times.get(id(parameter), ())
        return any(low <= time < high for low, high in self._spans.values() for time in times)


class Discard:
    """Drops a group's gradients, so that nothing waits for them.

    Args:
        writer: Writer of the step.
    """

    def __init__(self, writer: Writer | Collector) -> None:
        self._writer = writer

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Drop a gradient."""

    def take_draws(self, group: str, draws: Draws) -> float:
        """Drop a gradient."""
        return 0.0

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """A group's gradients of these parameters are complete."""
        self._writer.done(parameters)

    def passed(self, group: str, time: int | None) -> None:
        """The group's local pass has reached a time; None when it has ended."""
        self._writer.passed(group, time)


class Collector:
    """Collects gradients instead of writing them."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's complete gradient of a parameter."""
        add_gradients(self.gradients, {parameter: gradient})

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's complete gradient as keys and scalars; returns its squared norm."""
        total = 0.0
        for parameter, gradient, energy in draws.gradients():
            total += energy
            self.take(parameter, gradient)
        return total

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """No-op."""

    def passed(self, group: str, time: int | None) -> None:
        """No-op."""


class GroupSink:
    """Sums a group's gradients until they are complete; see `flops.estimators.base.Sink`.

    Args:
        writer: Writer of the step.
        group: Name of the group.
        parameters: Parameters of the group.
        hold: Whether nothing is complete before `close`, because other ranks, or queries after a
            pilot, add to it.
        exact: The exact gradient, for the cosine.
        share: This rank's share of some draws, first and last + 1; the others add theirs.

    Attributes:
        sums: Partial gradients of parameters that are not complete.
        energy: Squared norm of the complete gradients.
    """

    def __init__(
        self,
        writer: Writer | Collector | Discard,
        group: str,
        parameters: Sequence[nn.Parameter],
        hold: bool = False,
        exact: Gradients | None = None,
        share: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._writer, self._group, self._hold, self._exact = writer, group, hold, exact
        self._share = share
        self._open = dict.fromkeys(parameters)
        self.sums: Gradients = {}
        self.energy, self._truth, self._product = 0.0, 0.0, 0.0

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient."""
        add_gradients(self.sums, {parameter: gradient})

    def add_draws(self, draws: Draws) -> None:
        """The complete gradient of the group, as keys and scalars."""
        if self._share is not None:
            draws = draws.part(*self._share(len(draws.weights)))
        if self._hold or self._exact is not None:
            for parameter, gradient, _ in draws.gradients():
                self.add(parameter, gradient)
                self.complete([parameter])
        else:
            self.energy += self._writer.take_draws(self._group, draws)
            self._open.clear()

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Pass complete gradients on; ``after`` is the time that their pass has reached."""
        if self._hold:
            return
        whole = [p for p in parameters if p in self._open]
        for parameter in whole:
            del self._open[parameter]
            if parameter in self.sums:
                gradient = self.sums.pop(parameter)
                self._measure(parameter, gradient)
                self._writer.take(parameter, gradient)
        if after is not None:
            self._writer.passed(self._group, after)
        self._writer.done(whole)

    def close(self) -> None:
        """Pass the remaining gradients on."""
        self._hold = False
        self._writer.passed(self._group, None)
        self.complete(list(self._open))

    @property
    def cosine(self) -> float:
        """Cosine to the exact gradient; NaN if a parameter has none."""
        if self._exact is None or math.isnan(self._truth):
            return math.nan
        scale = (self.energy * self._truth) ** 0.5
        return self._product / scale if scale > 0 else 0.0

    def _measure(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.energy += inner(gradient, gradient)
        if self._exact is not None:
            truth = self._exact.get(parameter)
            self._truth += math.nan if truth is None else inner(truth, truth)
            self._product += 0.0 if truth is None else inner(gradient, truth)


def _hooks(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _accumulate(parameter: nn.Parameter, gradient: Tensor, own: bool = False) -> None:
    with torch.no_grad():
        if parameter.grad is not None:
            parameter.grad.add_(gradient.to(parameter))
        else:  # a copy, unless owned: autograd may return one tensor for two parameters
            parameter.grad = gradient.to(parameter, copy=not own)
