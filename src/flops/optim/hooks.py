"""Steps of any torch optimizer as gradients appear, so that one gradient exists at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flops.errors import FlopsError


class StepHooks:
    """Hooks that step an optimizer, until they are removed; also a context manager."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(group, parameter))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Let gradients stay in ``.grad`` again."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> StepHooks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _hook(
        self, group: dict[str, Any], parameter: nn.Parameter
    ) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            groups = self._optimizer.param_groups
            alone = {**group, "params": [parameter]}  # with the learning rate of this moment
            self._optimizer.param_groups = [alone]
            try:
                self._optimizer.step()
            finally:
                self._optimizer.param_groups = groups
            parameter.grad = None
            changed = [key for key in alone if key != "params" and _differ(alone, group, key)]
            if changed:
                raise FlopsError(
                    f"{type(self._optimizer).__name__} keeps {changed} for all parameters "
                    "together, so it cannot step them one by one; call its step() after estimate "
                    "instead"
                )

        return hook


def _differ(alone: dict[str, Any], group: dict[str, Any], key: str) -> bool:
    if key not in group or isinstance(group[key], torch.Tensor):
        return alone[key] is not group.get(key)
    return bool(alone[key] != group[key])


def step_as_gradients_appear(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Step each parameter, and free its gradient, as soon as that is complete.

    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    >>> step_as_gradients_appear(optimizer)
    >>> fg.estimate(inputs, targets)  # or loss.backward(): parameters have moved, .grad is None

    Memory: gradients of one target at a time instead of those of the whole model; what the
    optimizer itself remembers (twice the model for Adam) stays. The optimizer keeps its state and
    ``state_dict``, and schedulers work as ever; its ``step()`` and ``zero_grad()`` may stay in the
    loop and find nothing to do. Hooks of its steps run once for each parameter.

    Not possible with it, for want of all gradients at once: clipping by their norm, accumulation
    over micro-batches, and optimizers whose parameters depend on each other.

    Args:
        optimizer: Any torch optimizer that steps each parameter by itself (SGD, Adam, ...).

    Returns:
        Hooks, to be removed with ``remove()``.

    Raises:
        FlopsError: If the optimizer needs all parameters together.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FlopsError("LBFGS needs all gradients together, and cannot step as they appear")
    return StepHooks(optimizer)
