"""Step size chosen by the run itself: line searches along the optimizer's own update.

Adam moves every parameter by about its learning rate in each step, whatever the scale of the loss:
the right rate depends on how far the parameters have to go, which only the objective knows. In the
steps 0, 1, 2, 4, 8, ... the losses of the *next* batch, on which the update u was not estimated,
are evaluated along it,

    f_j(eta) = loss_j(theta + eta u) - loss_j(theta),

at rates that differ by factors of 4: upwards while the mean over the points falls, downwards until
it does not rise, each beyond 1.5 standard errors. The rate of the steps that follow is half of the
minimiser, since they go on in much the same direction; after the first search, the geometric mean
of that and the rate before. All these rows are candidates as any others: asked, charged, recorded.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FACTOR = 4.0  # between two rates of a search
BETWEEN = 2.0  # in the refinement at its end
MOST = 10  # rates of a search
DOWN = 3  # of them below the first
FRACTION = 0.5  # of the minimiser
CLEAR = 1.5  # standard errors


def due(step: int) -> bool:
    """Whether a step searches: 0, 1, 2, 4, 8, ..."""
    return step & (step - 1) == 0 if step else True


@dataclass
class LineSearch:
    """The search of one step.

    Args:
        first: Rate to begin with.

    Attributes:
        tried: Differences of the losses by rate, shape (points,).
    """

    first: float
    tried: dict[float, Tensor] = field(default_factory=dict, init=False)

    def rates(self) -> Generator[float, Tensor, float]:
        """Yields rates, is sent the differences of the losses; returns the best rate."""
        rate = best = self.first
        least = yield from self._try(rate)
        while _below(torch.zeros_like(least), least):
            if len(self.tried) > DOWN:  # it is the direction that is bad, which tells little
                return self.first / FACTOR
            rate = best = rate / FACTOR
            least = yield from self._try(rate)
        if len(self.tried) == 1:
            while len(self.tried) < MOST:
                rate *= FACTOR
                value = yield from self._try(rate)
                if not _below(value, least) and bool(least.any() or value.any()):
                    break  # if no loss has changed at all, the step is too short
                best, least = rate, value
        for rate in (best * BETWEEN, best / BETWEEN):
            if len(self.tried) < MOST:
                value = yield from self._try(rate)
                if _below(value, least):
                    return rate
        return best

    def _try(self, rate: float) -> Generator[float, Tensor, Tensor]:
        self.tried[rate] = yield rate
        return self.tried[rate]


def _below(some: Tensor, others: Tensor) -> bool:
    """Whether some losses are below others of the same points, clearly."""
    gap = some - others
    gap = gap[~torch.isnan(gap)]
    if len(gap) == 0:
        return False
    error = float(gap.std()) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
    return float(gap.mean()) < -CLEAR * error


@dataclass
class StepSize:
    """The learning rate of a run.

    Args:
        first: Rate of the first search; the noise scale, at which the loss is known to respond.
        rate: Current rate; None before the first search.
    """

    first: float
    rate: float | None = None

    @property
    def guess(self) -> float:
        """Where a search begins."""
        return self.first if self.rate is None else self.rate / FRACTION

    def update(self, best: float) -> float:
        """The rate after a search."""
        found = FRACTION * best
        rate: float = found if self.rate is None else (self.rate * found) ** 0.5
        self.rate = rate
        return rate

    def state_dict(self) -> dict[str, Any]:
        """The current rate."""
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a rate."""
        self.rate = state["rate"]
