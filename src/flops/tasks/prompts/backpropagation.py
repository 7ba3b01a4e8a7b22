"""Backpropagation through a local model, the upper bound of `flops tune`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from flops.blackbox.ask_tell import AskTell, Work
from flops.blackbox.order import Order
from flops.tasks.prompts.prompt import LocalObjective
from flops.tasks.tuning.methods import Recipe


class Backpropagation(AskTell):
    """Exact gradients of a local model, in the same batches with the same optimizer."""

    def __init__(
        self, start: Tensor, points: int, objective: LocalObjective, recipe: Recipe
    ) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.detach().clone())
        self.optimizer = torch.optim.Adam([self.theta], recipe.step_size or 1e-2)
        self._order = Order(points, recipe.batch, recipe.seed)
        self.local, self.steps = objective, 0

    @property
    def parameters(self) -> Tensor:
        """Current parameters."""
        return self.theta.detach().clone()

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""
        return self._order.steps_per_epoch

    def step_cost(self) -> int:
        """Zero: it evaluates no candidates."""
        return 0

    def stepping(self) -> Work[None]:
        """One step, without candidates."""
        points = self._order.at(self.steps)
        self.optimizer.zero_grad()
        self.local.losses(self.theta.expand(len(points), -1), points).mean().backward()
        self.optimizer.step()
        self.steps += 1
        return
        yield

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        return {
            "theta": self.parameters,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        with torch.no_grad():
            self.theta.copy_(state["theta"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps = int(state["steps"])
