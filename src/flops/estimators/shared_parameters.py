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
from flops.passes.replay import empty_prefix
from flops.perturb.draws import Draws, DrawShape, shifted
from flops.perturb.parameter_calls import CalledModule, ParameterCalls
from flops.perturb.random import SharedKind, fill


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

    def __init__(self, options: SharedNoise, calls: ParameterCalls, queries: Queries) -> None:
        self._options, self._calls, self._queries = options, calls, queries
        self.dtype = queries.losses.dtype
        self._draws = int(queries.counts[0]) // options.unit
        self._shape = DrawShape(calls.parameters, calls.padding)
        self._kept: dict[int, Tensor] = {}  # the latest draw of a small group
        # Without a clean pass there is nothing to replay.
        recorded = calls.prefix.needed <= queries.recorded
        self._prefix = calls.prefix if recorded else empty_prefix(calls.structure)
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
        alpha = -self._options.sigma if second else self._options.sigma
        around: dict[int, Action] = {}
        if self._shape.small and self._calls.root is not None:
            around[self._calls.root] = self._shift_all(draw, alpha)
        else:
            for called in self._calls.modules:
                around.update(dict.fromkeys(called.calls, self._shift(called, draw, alpha)))
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
        """The sum over the draws of w z, as keys and scalars."""
        weights = tuple(w * scale / self._draws for w in self._derivatives.tolist())
        key = self._queries.key
        sink.add_draws(Draws(self._options.noise, key, weights, self._shape, self._kept))

    def finish(self) -> Estimate:
        """One derivative per draw, and the mean loss."""
        parameters, padding = self._shape.parameters, self._shape.padding
        size = self._shape.offsets[-1] - sum(parameters[i][0].numel() for i in padding)
        return Estimate(self._derivatives, None, float(size), loss=self._loss)

    @cached_property
    def _starts(self) -> dict[nn.Parameter, int]:
        """Where each parameter begins in a draw."""
        return dict(zip(self._shape.parameters, self._shape.offsets, strict=False))

    def _shift(self, called: CalledModule, draw: int, alpha: float) -> Action:
        """Parameters of a unit point to perturbed copies while it runs."""
        kind, key = self._options.noise, (*self._queries.key, draw)

        def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            saved = [(p, p.data) for p in called.parameters.values()]
            try:
                with called.clean_padding() if called.lookups else nullcontext():
                    for path, p in called.parameters.items():
                        padding = called.padding.get(path)
                        p.data = shifted(p.data, kind, key, alpha, self._starts[p], padding)
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
            self._kept[draw] = fill(self._options.noise, key, self._row[0])
        return self._row[1]

    @cached_property
    def _row(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Room for a draw of a small group, and the part of each parameter in it."""
        device, size = self._shape.parameters[0].device, self._shape.offsets[-1]
        row = torch.empty(size, dtype=torch.float32, device=device)
        return row, self._shape.views(row)
