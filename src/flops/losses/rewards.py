"""Rewards: objectives without a derivative, such as exact match, F1 or a function of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flops.errors import BatchError

RewardFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Reward:
    """The negative reward of each row: minimising it maximises the mean reward.

        l_j = -r(outputs_j, targets_j)

    A query observes the reward under noise; the gradient is that of the reward's mean over the
    noise, which is smooth also where the reward has steps. These need a sigma at which rewards
    change: with one so small that all queries agree with the clean pass, the estimate is 0.
    Backpropagation (`Exact`) refuses it.

    Args:
        fn: ``rewards = fn(outputs, targets)``, one number per row: a tensor, an array or a list.

    Raises:
        BatchError: If there is not one reward per row.
    """

    fn: RewardFunction

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """One loss per row, shape (B,), without a graph."""
        with torch.no_grad():
            found = self.fn(outputs, targets)
        try:
            rewards = torch.as_tensor(found).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(f"rewards must be numbers, one per row: {error}") from error
        if rewards.dim() != 1:
            raise BatchError(
                f"a reward function must return one number per row, shape (B,), not "
                f"{tuple(rewards.shape)}; do not average over the batch"
            )
        return -(rewards if rewards.is_floating_point() else rewards.double())


def reward(fn: RewardFunction) -> Reward:
    """A loss function that maximises a reward; also a decorator. See `Reward`."""
    if not callable(fn):
        raise TypeError(f"reward takes a function of (outputs, targets), not {fn!r}")
    return Reward(fn)
