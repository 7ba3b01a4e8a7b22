"""Parameter noise that the whole batch shares: MeZO's seed trick.

Noise is made anew from its key whenever it is wanted, piece by piece, and a module's parameters
point to their perturbed copy only while it runs. So beside the model there is at most that copy of
one module; the parameters themselves are never written to and come back bit-exact; and a gradient
is keys and scalars until somebody wants it as a tensor. Small groups keep their noise for the step,
and are perturbed as a whole.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flops.estimators.base import (
    BatchPlan,
    Estimate,
    Estimation,
    Perturbation,
    Queries,
    Rows,
    Runner,
    Sink,
)
from flops.passes.intercept import Action, Forward
from flops.passes.replay import nothing
from flops.perturb.draws import Draws, DrawShape, Noise, Pieces, shifted
from flops.perturb.parameter_calls import Unit, Units


class SharedNoise(Protocol):
    """What shared draws need to know of their estimator."""

    @property
    def sigma(self) -> float: ...  # noqa: D102

    @property
    def shared_noise(self) -> Noise: ...  # noqa: D102

    @property
    def unit(self) -> int: ...  # noqa: D102

    @property
    def reads_clean(self) -> bool: ...  # noqa: D102

    def derivatives(self, losses: Tensor, clean: Tensor) -> Tensor: ...  # noqa: D102

    def scale(self, losses: Tensor) -> float: ...  # noqa: D102

    def warn(self, queries: Queries, derivatives: Tensor, loss: float | None = None) -> None: ...  # noqa: D102


class SharedDraws(Estimation):
    """The mean over draws of w z times a scale, with a directional derivative w for each draw.

    Args:
        noise: Of the draws.
        units: Where the parameters are perturbed.
        queries: The group's part of the step.
        unit: Passes over the batch for each draw.
    """

    def __init__(self, noise: Noise, units: Units, queries: Queries, unit: int = 1) -> None:
        self._drawn, self._units, self._queries = noise, units, queries
        self.dtype = queries.losses.dtype
        self._passes = int(queries.counts[0]) // unit * unit
        self._shape = DrawShape(units.parameters, units.padding)
        self._kept: dict[int, Tensor] = {}  # the latest draw of a small group
        # Without a clean pass there is nothing to replay.
        recorded = units.prefix.needed <= queries.recorded
        self._prefix = units.prefix if recorded else nothing(units.structure)
        self._planned = False
        self._derivatives = torch.empty(0)
        self._scale = 1.0
        self._loss = float("nan")

    def plan(self) -> BatchPlan | None:
        """Every draw with each of its signs."""
        if self._planned:
            return None
        self._planned = True
        return BatchPlan([self._prefix] * self._passes)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The sum over the draws of w z, as keys and scalars."""
        derivatives = self._derivatives.tolist()
        scale *= self._scale
        weights = tuple(w * scale / len(derivatives) for w in derivatives)
        sink.add_draws(Draws(self._drawn, self._queries.key, weights, self._shape, self._kept))

    def finish(self) -> Estimate:
        """One derivative per draw, and the mean loss."""
        energy = self._scale**2 * self._shape.energy(self._drawn)
        return Estimate(self._derivatives, None, energy, loss=self._loss)

    def _pieces(self, parameter: nn.Parameter, draw: int) -> Pieces:
        """A parameter's noise in a draw."""
        key, number = (*self._queries.key, draw), self._shape.numbers[parameter]
        return self._shape.pieces(self._drawn, key, number)


class SharedEstimation(SharedDraws):
    """Finite differences: mean losses of the batch under each draw."""

    def __init__(self, options: SharedNoise, units: Units, queries: Queries) -> None:
        super().__init__(options.shared_noise, units, queries, options.unit)
        self._options = options

    def ask(self, rows: Rows) -> Perturbation:
        """The whole model shifted along one draw."""
        draw, second = divmod(int(rows.draws[0]), self._options.unit)
        alpha = -self._options.sigma if second else self._options.sigma
        around: dict[int, Action] = {}
        if self._shape.small and self._units.root is not None:
            around[self._units.root] = self._shift_all(draw, alpha)
        else:
            for unit in self._units.units:
                around.update(dict.fromkeys(unit.calls, self._shift(unit, draw, alpha)))
        return Perturbation(self._prefix, around=around)

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """One derivative per draw, from the mean losses of the batch."""
        means = values.view(-1, self._queries.size).mean(1)
        clean = self._queries.losses.mean().cpu()
        self._derivatives = self._options.derivatives(means, clean)
        self._scale = self._options.scale(means)
        self._loss = float(means.mean())
        loss = None if self._options.reads_clean else self._loss
        self._options.warn(self._queries, self._derivatives, loss)

    def _shift(self, unit: Unit, draw: int, alpha: float) -> Action:
        """Parameters of a unit point to perturbed copies while it runs."""

        def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            saved = [(p, p.data) for p in unit.parameters.values()]
            try:
                with unit.clean_padding() if unit.lookups else nullcontext():
                    for path, p in unit.parameters.items():
                        padding = unit.padding.get(path)
                        p.data = shifted(p.data, self._pieces(p, draw), alpha, padding)
                    return forward(*args, **kwargs)
            finally:
                for parameter, data in saved:
                    parameter.data = data

        return action

    def _shift_all(self, draw: int, alpha: float) -> Action:
        """As above for all parameters at once, around the whole model."""
        parameters = self._shape.parameters

        def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            clean = [p.data for p in parameters]
            noisy = torch._foreach_add(clean, self._noise(draw), alpha=alpha)
            try:
                for p, data in zip(parameters, noisy, strict=True):
                    p.data = data if data.dtype == p.dtype else data.to(p.dtype)
                return forward(*args, **kwargs)
            finally:
                for p, data in zip(parameters, clean, strict=True):
                    p.data = data

        return action

    def _noise(self, draw: int) -> tuple[Tensor, ...]:
        """Of each parameter of a small group."""
        if draw not in self._kept:
            self._kept.clear()
            key = (*self._queries.key, draw)
            self._kept[draw] = self._shape.fill(self._drawn, key, self._row[0])
        return self._row[1]

    @cached_property
    def _row(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Room for a draw of a small group, and the part of each parameter in it."""
        device, size = self._shape.parameters[0].device, self._shape.offsets[-1]
        row = torch.empty(size, dtype=torch.float32, device=device)
        return row, self._shape.views(row)
