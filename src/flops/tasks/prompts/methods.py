"""The methods of `flops tune`, each a configuration of the same tuner.

| name | noise | allocation |
|---|---|---|
| manual | none: class texts without prompt vectors | |
| lr | Gaussian, per point | equal |
| ops-lr | Gaussian, per point | Gaussian, the paper's |
| spsa | antithetic Rademacher, per point | equal |
| ops-spsa | antithetic Rademacher, per point | Gaussian |
| shaped-lr | Gaussian, with Jacobian memory of the logits | Gaussian |
| cma-es | a population, each vector shared by the batch | |
| bp | none: backpropagation through a local model, an upper bound | |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators import Equal, Gaussian
from flops.allocators.base import Allocator
from flops.blackbox.ask_tell import AskTell, Work
from flops.blackbox.cma import CMAES
from flops.blackbox.order import Order
from flops.blackbox.outputs import Outputs
from flops.blackbox.tuner import Tuner
from flops.blackbox.tuning import Stepper
from flops.errors import FlopsError
from flops.estimators import SPSA, LikelihoodRatio
from flops.subspace.config import Shaping
from flops.tasks.prompts.names import TuneMethod
from flops.tasks.prompts.prompt import LocalObjective


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a method.

    Attributes:
        name: The method.
        step_size: Learning rate of Adam; for cma-es the initial standard deviation.
        sigma: Noise scale.
        queries: Mean queries per point and step.
        batch: Points per step.
        seed: Seeds the noise and the order of points.
    """

    name: TuneMethod
    step_size: float
    sigma: float = 0.01
    queries: float = 60.0
    batch: int = 64
    seed: int = 0


def stepper(
    recipe: Recipe,
    start: Tensor,
    points: int,
    parts: dict[str, tuple[int, ...]],
    local: LocalObjective | None = None,
    outputs: Outputs | None = None,
) -> Stepper | None:
    """The optimizer of a method; None for the manual prompt.

    Args:
        recipe: The method.
        start: Parameters to start from.
        points: Number of points.
        parts: Shapes of the parameters by name.
        local: The model itself, for bp.
        outputs: Outputs in the columns, for shaped noise.
    """
    if recipe.name == "manual":
        return None
    if recipe.name == "cma-es":
        return CMAES(
            start, points=points, sigma=recipe.step_size, batch=recipe.batch, seed=recipe.seed
        )
    if recipe.name == "bp":
        if local is None:
            raise FlopsError("bp needs the model itself, not a service: pass --model")
        return Backpropagation(start, points, local, recipe)
    estimator: LikelihoodRatio | SPSA = SPSA(recipe.sigma)
    if "lr" in recipe.name:
        shaping = Shaping() if recipe.name == "shaped-lr" else None
        estimator = LikelihoodRatio(recipe.sigma, shaping=shaping)
    learned = recipe.name in ("ops-lr", "ops-spsa", "shaped-lr")
    allocator: Allocator = Gaussian() if learned else Equal()
    return Tuner(
        start,
        points=points,
        estimator=estimator,
        queries=recipe.queries,
        allocator=copy.deepcopy(allocator),
        batch=recipe.batch,
        learning_rate=recipe.step_size,
        parts=parts,
        outputs=outputs if estimator.shaping is not None else None,
        seed=recipe.seed,
    )


class Backpropagation(AskTell):
    """Exact gradients of a local model, in the same batches with the same optimizer."""

    def __init__(
        self, start: Tensor, points: int, objective: LocalObjective, recipe: Recipe
    ) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.detach().clone())
        self.optimizer = torch.optim.Adam([self.theta], recipe.step_size)
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
