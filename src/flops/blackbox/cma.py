"""CMA-ES, the standard black-box baseline, with the same ask/tell interface.

Hansen, "The CMA evolution strategy: a tutorial", 2016; the `cma` package implements it. A
generation is a population of parameter vectors, each with the mean loss of the same batch of
points; the estimate is the mean of the search distribution. From 200 parameters on the covariance
is diagonal: a full one costs d^2 memory and d^3 time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.blackbox.ask_tell import PAUSE, AskTell, Work
from flops.blackbox.objective import Candidates, Objective
from flops.blackbox.order import Order
from flops.errors import FlopsError
from flops.optional import require
from flops.perturb.random import mix

FULL = 200  # parameters up to which the covariance is a full matrix


class CMAES(AskTell):
    """CMA-ES over parameters, with batches of points.

    Args:
        start: Mean of the first population, shape (d,).
        objective: As for `Tuner`.
        points: Number of points.
        sigma: Initial standard deviation of the search distribution.
        batch: Points per generation.
        population: Vectors per generation; None is 4 + 3 log d, the package's default.
        seed: Seeds the samples and the order of points.
    """

    def __init__(
        self,
        start: Tensor,
        objective: Objective | None = None,
        *,
        points: int = 1,
        sigma: float = 0.3,
        batch: int = 64,
        population: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(objective)
        if sigma <= 0:
            raise FlopsError(f"sigma must be positive, not {sigma}")
        cma = require("cma", "cma")
        self._order = Order(points, batch, seed)
        # Its own generator: the package would seed the global one.
        source = np.random.Generator(np.random.PCG64(mix(seed, 19)))
        options: dict[str, Any] = {
            "seed": np.nan,
            "randn": lambda *shape: source.standard_normal(shape),
            "verbose": -9,
            "CMA_diagonal": len(start) > FULL,
        }
        if population is not None:
            options["popsize"] = population
        with _preserved_numpy_state():
            self._search = cma.CMAEvolutionStrategy(start.double().numpy(), sigma, options)
        self.population = int(self._search.popsize)
        self.steps, self.loss = 0, float("nan")
        self._told: list[tuple[Tensor, list[float]]] = []

    def __repr__(self) -> str:
        size, points = len(self.parameters), self._order.points
        what = f"{size} parameters, {points} points, population={self.population}"
        return f"CMAES({what}, steps={self.steps})"

    @property
    def parameters(self) -> Tensor:
        """Mean of the search distribution, shape (d,)."""
        return torch.from_numpy(np.array(self._search.mean)).float()

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""
        return self._order.steps_per_epoch

    def step_cost(self) -> int:
        """Rows of the next generation."""
        return self.population * len(self._batch())

    def work(self) -> Work[None]:
        """An endless sequence of generations."""
        while True:
            yield from self.stepping()
            yield PAUSE

    def stepping(self) -> Work[None]:
        """One generation."""
        points = self._batch()
        with _preserved_numpy_state():
            own = self._search.ask()
        vectors = torch.from_numpy(np.stack(own)).float()
        if self.decide is not None:
            vectors = self.decide("population", vectors)
        values = []
        for vector in vectors:
            columns = yield Candidates(vector.expand(len(points), -1), points)
            losses = columns[:, 0].double()
            values.append(float(losses[~torch.isnan(losses)].mean()))  # of points that arrived
        worst = max((value for value in values if value == value), default=math.nan)
        if worst != worst:
            raise FlopsError("every row of a generation failed: there is nothing to step from")
        self._tell(own, vectors, [value if value == value else worst for value in values])

    def _tell(self, own: list[Any], vectors: Tensor, values: list[float]) -> None:
        """End a generation with the evaluated vectors, even if this process sampled others."""
        same = torch.equal(torch.from_numpy(np.stack(own)).float(), vectors)
        with _preserved_numpy_state():
            self._search.tell(own if same else list(vectors.double().numpy()), values)
        self._told.append((vectors, values))
        self.loss = sum(values) / len(values)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """All generations: the package has no state format that its other versions can read."""
        return {
            "population": self.population,
            "vectors": [vectors for vectors, _ in self._told],
            "values": [values for _, values in self._told],
            "asked": self.asked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, by replaying every generation.

        Raises:
            FlopsError: If the population size differs, or this search has begun.
        """
        if self.steps or state["population"] != self.population:
            raise FlopsError(
                f"the state has populations of {state['population']}, a new search of "
                f"{self.population}; load it before the first step"
            )
        for vectors, values in zip(state["vectors"], state["values"], strict=True):
            with _preserved_numpy_state():
                own = self._search.ask()
            self._tell(own, vectors, [float(value) for value in values])
        self.restart(int(state["asked"]))

    def _batch(self) -> Tensor:
        return self._order.at(self.steps)


class _preserved_numpy_state:
    """Restore numpy's global random state, which the package may change."""

    def __enter__(self) -> None:
        self._state = np.random.get_state()  # noqa: NPY002

    def __exit__(self, *_: object) -> None:
        np.random.set_state(self._state)  # noqa: NPY002
