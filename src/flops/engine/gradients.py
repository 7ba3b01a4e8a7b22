"""The second phase of a step: gradients go into ``.grad``, and whoever waits for them is called.

Where no parameter has a hook, nothing is written before all gradients are known, so that whatever
fails leaves all as it was. `Tensor.register_post_accumulate_grad_hook` is PyTorch's convention for
stepping an optimizer as gradients appear: with such hooks every parameter is written as soon as its
gradient is complete and nothing that still runs reads it, and its hooks are called.

A gradient that follows from keys and scalars is made where it is stored; an `Update` in the place
of ``.grad`` takes it as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flops.passes.checks import RandomState
from flops.passes.inner_products import inner
from flops.passes.local_vjp import Gradients, add_gradients
from flops.passes.structure import Structure
from flops.perturb.draws import Draws

Span = tuple[int, int]
"""First and last moment of a pass that is still to be made, by the clock of the structure."""

Update = Callable[[str, Draws], float]
"""Takes a group's gradient in place of ``.grad``; returns its squared length."""


class Writer:
    """Writes the gradients of all groups of a step.

    Args:
        groups: Parameters of each group.
        spans: The local pass that each group still makes; None for none.
        structure: Of the forward pass, which knows when a parameter is read.
        update: Takes the gradients in place of ``.grad``.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[nn.Parameter]],
        spans: Mapping[str, Span | None],
        structure: Structure,
        update: Update | None = None,
    ) -> None:
        self._update = update
        self._expected = Counter(p for parameters in groups.values() for p in parameters)
        self.streaming = update is not None or any(_hooks(p) for p in self._expected)
        self._spans = {name: span for name, span in spans.items() if span is not None}
        self._times: dict[int, list[int]] = {}
        if self.streaming:
            for use in structure.uses:
                self._times.setdefault(use.parameter, []).append(use.time)
        self._staged: Gradients = {}
        self._own: set[nn.Parameter] = set()  # staged in memory that nobody else has
        self._waiting: list[nn.Parameter] = []
        self._written: set[nn.Parameter] = set()
        self._random: RandomState | None = None

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's whole gradient of a parameter."""
        if not self.streaming:
            add_gradients(self._staged, {parameter: gradient})
            return
        _accumulate(parameter, gradient)
        self._written.add(parameter)

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's whole gradient as keys and scalars; returns its squared length."""
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
        """A group has nothing more for these parameters."""
        if not self.streaming:
            return
        self._expected.subtract(parameters)
        # As in a backward pass, nobody is called for a parameter without a gradient.
        ready = [p for p in parameters if self._expected[p] == 0 and p in self._written]
        self._waiting += ready
        for parameter in [p for p in self._waiting if not self._read_later(p)]:
            self._waiting = [p for p in self._waiting if p is not parameter]
            self._call_hooks(parameter)

    def passed(self, group: str, time: int | None) -> None:
        """How far the group's local pass has come; None when it is over."""
        if time is None:
            self._spans.pop(group, None)
        elif group in self._spans:
            self._spans[group] = (time, self._spans[group][1])

    def commit(self) -> None:
        """Write what is left."""
        while self._staged:  # one by one, so that copy and original never stand side by side
            parameter, gradient = self._staged.popitem()
            _accumulate(parameter, gradient, own=parameter in self._own)
        while self._waiting:
            self._call_hooks(self._waiting.pop())
        if self._random is not None:
            self._random.restore()

    def _call_hooks(self, parameter: nn.Parameter) -> None:
        """Call them as autograd does; random numbers that they draw are theirs, not the model's."""
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


class Collector:
    """Keeps gradients instead of writing them."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's whole gradient of a parameter."""
        add_gradients(self.gradients, {parameter: gradient})

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's whole gradient as keys and scalars; returns its squared length."""
        total = 0.0
        for parameter, gradient, energy in draws.gradients():
            total += energy
            self.take(parameter, gradient)
        return total

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nobody waits for them."""

    def passed(self, group: str, time: int | None) -> None:
        """Nobody waits for them."""


class GroupSink:
    """Sums a group's gradients until they are complete; see `flops.estimators.base.Sink`.

    Args:
        writer: Of the step.
        group: Name of the group.
        parameters: Of the group.
        hold: Whether nothing is complete before `close`: other ranks, or the later queries behind
            a pilot, have a part of it.
        exact: The exact gradient, to compare with.

    Attributes:
        sums: What has come so far of parameters that are not complete.
        energy: Squared length of what is complete.
    """

    def __init__(
        self,
        writer: Writer | Collector,
        group: str,
        parameters: Sequence[nn.Parameter],
        hold: bool = False,
        exact: Gradients | None = None,
    ) -> None:
        self._writer, self._group, self._hold, self._exact = writer, group, hold, exact
        self._open = dict.fromkeys(parameters)
        self.sums: Gradients = {}
        self.energy, self._truth, self._product = 0.0, 0.0, 0.0

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient."""
        add_gradients(self.sums, {parameter: gradient})

    def add_draws(self, draws: Draws) -> None:
        """The whole gradient of the group, as keys and scalars."""
        if self._hold or self._exact is not None:
            for parameter, gradient, _ in draws.gradients():
                self.add(parameter, gradient)
                self.complete([parameter])
        else:
            self.energy += self._writer.take_draws(self._group, draws)
            self._open.clear()

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Hand over these parameters; ``after`` is the moment of the pass that made them."""
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
        """Hand over the rest: nothing more comes."""
        self._hold = False
        self._writer.passed(self._group, None)
        self.complete(list(self._open))

    @property
    def cosine(self) -> float:
        """To the exact gradient over the parameters that have one; NaN where one has not."""
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
        else:  # a copy but for our own: autograd may hand out one tensor for two parameters
            parameter.grad = gradient.to(parameter, copy=not own)
