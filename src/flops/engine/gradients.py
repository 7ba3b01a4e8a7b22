"""Gradients that are not just added to ``.grad`` at the end of a step (`flops.engine.step.Staged`).

`Tensor.register_post_accumulate_grad_hook` is PyTorch's convention for stepping an optimizer as
gradients appear: with such hooks every parameter is written, and its hooks are called, as soon as
its gradient is complete and no later pass reads it.

A gradient given by keys and scalars is generated where it is stored; an `Update` receives it in
that form instead of ``.grad``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from flops.passes.guards import RandomState
from flops.passes.local_vjp import Gradients, accumulate, add_gradients
from flops.passes.structure import Structure
from flops.perturb.draws import Draws

Span = tuple[int, int]
"""First and last time of a future pass, by the clock of the structure."""

HOOKS = "_post_accumulate_grad_hooks"  # of a parameter, by torch

Update = Callable[[str, Draws], float]
"""Receives a group's gradient instead of ``.grad``; returns its squared norm."""


class Writer(Protocol):
    """Takes the gradients of a step.

    Attributes:
        streaming: Whether parameters are written before all gradients are known.
        seeded: Whether gradients are needed as keys and scalars.
    """

    streaming: bool
    seeded: bool

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's complete gradient of a parameter."""
        ...

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's complete gradient as keys and scalars; returns its squared norm."""
        ...

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """A group's gradients of these parameters are complete."""
        ...

    def passed(self, group: str, time: int | None) -> None:
        """The group's local pass has reached a time; None when it has ended."""
        ...

    def commit(self) -> None:
        """Write what is not written yet."""
        ...


class Streaming:
    """Writes every gradient as soon as it is complete, and calls its hooks.

    Args:
        groups: Parameters of each group.
        spans: Pass of each group's local VJPs; None for none.
        structure: Structure of the forward pass, with the uses of parameters.
        update: Receives the gradients instead of ``.grad``.
    """

    streaming = True

    def __init__(
        self,
        groups: Mapping[str, Sequence[nn.Parameter]],
        spans: Mapping[str, Span | None],
        structure: Structure,
        update: Update | None = None,
    ) -> None:
        self._update, self.seeded = update, update is not None
        self._expected = Counter(p for parameters in groups.values() for p in parameters)
        self._spans = {name: span for name, span in spans.items() if span is not None}
        self._times: dict[int, list[int]] = {}
        for use in structure.uses:
            self._times.setdefault(use.parameter, []).append(use.time)
        self._waiting: list[nn.Parameter] = []
        self._written: set[nn.Parameter] = set()
        self._random: RandomState | None = None

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A group's complete gradient of a parameter."""
        accumulate(parameter, gradient)
        self._written.add(parameter)

    def take_draws(self, group: str, draws: Draws) -> float:
        """A group's complete gradient as keys and scalars; returns its squared norm."""
        if self._update is not None:
            return self._update(group, draws)
        total = 0.0
        for parameter, gradient, energy in draws.gradients():
            total += energy
            accumulate(parameter, gradient, own=True)
            self._written.add(parameter)
            del gradient  # the hooks may free it
            self.done([parameter])
        return total

    def done(self, parameters: Sequence[nn.Parameter]) -> None:
        """A group's gradients of these parameters are complete."""
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
        """Call the remaining hooks."""
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
                for hook in list((getattr(parameter, HOOKS, None) or {}).values()):
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

    def __init__(self, writer: Writer) -> None:
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

    streaming = seeded = False

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

    def commit(self) -> None:
        """No-op."""
