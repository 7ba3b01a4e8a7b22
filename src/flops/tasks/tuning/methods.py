"""The methods of `flops tune`, each a configuration of the same tuner.

| name | noise | allocation |
|---|---|---|
| manual, start | none: class texts without prompt vectors, the parameters as given | |
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

from torch import Tensor

from flops.allocators import Equal, Gaussian
from flops.allocators.base import Allocator
from flops.blackbox.cma import CMAES
from flops.blackbox.outputs import Outputs
from flops.blackbox.tuner import Tuner
from flops.blackbox.tuning import Stepper
from flops.errors import FlopsError
from flops.estimators import SPSA, LikelihoodRatio
from flops.subspace.config import Shaping
from flops.tasks.tuning.names import FIXED, TuneMethod


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a method.

    Attributes:
        name: The method.
        step_size: Learning rate of Adam, None to search for it; for cma-es the initial standard
            deviation.
        sigma: Noise scale.
        queries: Mean queries per point and step.
        batch: Points per step.
        seed: Seeds the noise and the order of points.
    """

    name: TuneMethod
    step_size: float | None
    sigma: float = 0.01
    queries: float = 60.0
    batch: int = 64
    seed: int = 0


def stepper(
    recipe: Recipe,
    start: Tensor,
    points: int,
    parts: dict[str, tuple[int, ...]] | None = None,
    outputs: Outputs | None = None,
) -> Stepper | None:
    """The optimizer of a method; None for one that takes no step.

    Args:
        recipe: The method.
        start: Parameters to start from.
        points: Number of points.
        parts: Shapes of the parameters by name.
        outputs: Outputs in the columns, for shaped noise.
    """
    if recipe.name in FIXED:
        return None
    if recipe.name == "cma-es":
        if recipe.step_size is None:
            raise FlopsError("cma-es needs an initial standard deviation: pass --step-sizes")
        size, batch, seed = recipe.step_size, recipe.batch, recipe.seed
        return CMAES(start, points=points, sigma=size, batch=batch, seed=seed)
    if recipe.name == "bp":
        raise FlopsError("bp needs the model itself, not a service: pass --model")
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
