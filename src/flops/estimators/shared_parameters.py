"""Parameter noise that the whole batch shares: MeZO's seed trick.

No more than one module's noise exists at a time (but for small groups, whose noise is kept for the
step): it is made anew from its key whenever it is wanted, and a module's parameters point to their
perturbed copy only while it runs. The parameters themselves are never written to, so they come back
bit-exact; and no gradient exists before it is written, parameter by parameter.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

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
from flops.perturb.parameter_calls import Unit, Units
from flops.perturb.random import SharedKind, fill

KEEP = 1 << 22  # noise values of a draw, 16 MB: little beside any process
Kept = dict[tuple[int, int, int], Tensor]
"""Noise by draw, unit and parameter."""


class SharedNoise(Protocol):
    """What shared draws need to know of their estimator."""

    @property
    def sigma(self) -> float: ...  # noqa: D102

    @property
    def noise(self) -> SharedKind: ...  # noqa: D102

    @property
    def unit(self) -> int: ...  # noqa: D102

    @property
    def reads_clean(self) -> bool: ...  # noqa: D102

    def derivatives(self, losses: Tensor, clean: Tensor) -> Tensor: ...  # noqa: D102

    def warn(self, queries: Queries, derivatives: Tensor, loss: float | None = None) -> None: ...  # noqa: D102


class SharedEstimation(Estimation):
    """Mean losses of the batch under each draw, then the sum of w z, parameter by parameter."""

    def __init__(self, options: SharedNoise, units: Units, queries: Queries) -> None:
        self._options, self._units, self._queries = options, units, queries
        self.dtype = queries.losses.dtype
        self._draws = int(queries.counts[0]) // options.unit
        # A draw's noise is made once for both signs, if that is little memory; else made anew.
        self._kept: Kept | None = {} if units.size <= KEEP else None
        # Without a clean pass there is nothing to replay.
        recorded = units.prefix.needed <= queries.recorded
        self._prefix = units.prefix if recorded else nothing(units.structure)
        self._planned = False
        self._derivatives = torch.empty(0)
        self._loss = float("nan")

    def plan(self) -> BatchPlan | None:
        """Every draw with each of its signs."""
        if self._planned:
            return None
        self._planned = True
        return BatchPlan([self._prefix] * (self._draws * self._options.unit))

    def ask(self, rows: Rows) -> Perturbation:
        """The whole model shifted along one draw."""
        draw, second = divmod(int(rows.draws[0]), self._options.unit)
        sign = -1.0 if second else 1.0
        around: dict[int, Action] = {}
        for number, unit in enumerate(self._units.units):
            around.update(dict.fromkeys(unit.calls, self._shift(draw, sign, number, unit)))
        return Perturbation(self._prefix, around=around)

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """One derivative per draw, from the mean losses of the batch."""
        means = values.view(-1, self._queries.size).mean(1)
        clean = self._queries.losses.mean().cpu()
        self._derivatives = self._options.derivatives(means, clean)
        self._loss = float(means.mean())
        loss = None if self._options.reads_clean else self._loss
        self._options.warn(self._queries, self._derivatives, loss)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The sum over the draws of w z, one parameter at a time."""
        weights = [w * scale / self._draws for w in self._derivatives.tolist()]
        for number, unit in enumerate(self._units.units):
            for place, (path, parameter) in enumerate(unit.parameters.items()):
                wide = torch.promote_types(torch.float32, parameter.dtype)
                total = torch.zeros_like(parameter, dtype=wide)
                for draw, weight in enumerate(weights):
                    total.add_(self._noise(draw, number, unit, place, path), alpha=weight)
                sink.add(parameter, total)
                if (number, place) in self._last_places:
                    sink.complete([parameter])

    @cached_property
    def _last_places(self) -> set[tuple[int, int]]:
        """Where each parameter comes last: a tied one has several places."""
        last = {
            parameter: (number, place)
            for number, unit in enumerate(self._units.units)
            for place, parameter in enumerate(unit.parameters.values())
        }
        return set(last.values())

    def finish(self) -> Estimate:
        """One derivative per draw, and the mean loss."""
        return Estimate(self._derivatives, None, float(self._units.size), loss=self._loss)

    def _noise(self, draw: int, number: int, unit: Unit, place: int, path: str) -> Tensor:
        z = None if self._kept is None else self._kept.get((draw, number, place))
        if z is None:
            parameter = unit.parameters[path]
            z = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            fill(self._options.noise, (*self._queries.key, draw, number, place), z)
            if path in unit.padding:
                z[unit.padding[path]] = 0
            if self._kept is not None:
                if self._kept and next(iter(self._kept))[0] != draw:
                    self._kept.clear()
                self._kept[draw, number, place] = z
        return z

    def _shift(self, draw: int, sign: float, number: int, unit: Unit) -> Action:
        def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            saved = [(p, p.data) for p in unit.parameters.values()]
            try:
                with unit.clean_padding():
                    for place, (path, parameter) in enumerate(unit.parameters.items()):
                        z = self._noise(draw, number, unit, place, path)
                        alpha = sign * self._options.sigma
                        parameter.data = torch.add(parameter.data, z, alpha=alpha)
                    return forward(*args, **kwargs)
            finally:
                for parameter, data in saved:
                    parameter.data = data

        return action
