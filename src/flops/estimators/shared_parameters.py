"""Shared parameter noise: MeZO's seed trick.

Noise is regenerated from its key piece by piece, and a module's parameters point to a perturbed
copy only while it runs. So besides the model there is at most the copy of one module; the
parameters are never modified, and restored bit-exactly; and a gradient is keys and scalars until it
is needed as a tensor. Small groups cache their noise, and are perturbed during the whole pass.
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
from flops.passes.ranks import Replicas
from flops.passes.replay import Action, Forward, empty_prefix
from flops.perturb.draws import Draws, DrawShape, Noise, Pieces, shifted
from flops.perturb.parameter_calls import CalledModule, ParameterCalls


class SharedNoise(Protocol):
    """Options of the estimator that shared draws use."""

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
        noise: Distribution of the noise.
        calls: Calls during which the parameters are perturbed.
        queries: The group's part of the step.
        unit: Passes over the batch for each draw.
    """

    joint = True

    def __init__(
        self, noise: Noise, calls: ParameterCalls, queries: Queries, unit: int = 1
    ) -> None:
        self._drawn, self._calls, self._queries = noise, calls, queries
        self.dtype = queries.losses.dtype
        self._passes = int(queries.counts[0]) // unit * unit
        self._shape = DrawShape(calls.parameters, calls.padding)
        self._kept: dict[int, Tensor] = {}  # the latest draw of a small group
        # Without a clean pass there is nothing to replay.
        recorded = calls.prefix.needed <= queries.recorded
        self._prefix = calls.prefix if recorded else empty_prefix(calls.structure)
        self._planned = False
        self._derivatives = torch.empty(0)
        self._scale = 1.0
        self._loss = float("nan")

    def plan(self) -> BatchPlan | None:
        """All draws, with each of their signs."""
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


def mean_losses(by_pass: Tensor, queries: Queries, replicas: Replicas) -> tuple[Tensor, Tensor]:
    """Mean loss of all replicas' points in each pass, and without noise.

    Args:
        by_pass: Losses of this replica's points, shape (passes, B).
        queries: The group's queries, with the clean losses.
        replicas: Ranks with other points.
    """
    if not replicas.several:
        return by_pass.mean(1), queries.losses.mean().cpu()
    clean = queries.losses.cpu().double().sum().view(1)
    (sums,) = replicas.sum([torch.cat([by_pass.double().sum(1), clean])])
    means = sums / replicas.total
    return means[:-1], means[-1]


class SharedEstimation(SharedDraws):
    """Finite differences: mean losses of the batch under each draw."""

    def __init__(self, options: SharedNoise, calls: ParameterCalls, queries: Queries) -> None:
        super().__init__(options.shared_noise, calls, queries, options.unit)
        self._options = options

    def ask(self, rows: Rows) -> Perturbation:
        """All parameters shifted along one draw."""
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
        """One directional derivative per draw, from the mean losses of the batch."""
        by_pass = values.view(-1, self._queries.size)
        if bool(torch.isnan(by_pass).any()):
            self._collect_arrived(by_pass)
            return
        means, clean = mean_losses(by_pass, self._queries, runner.replicas)
        self._derivatives = self._options.derivatives(means, clean)
        self._scale = self._options.scale(means)
        self._loss = float(means.mean())
        loss = None if self._options.reads_clean else self._loss
        self._options.warn(self._queries, self._derivatives, loss)

    def _collect_arrived(self, losses: Tensor) -> None:
        """As `collect`, from the points that arrived under both signs of a draw.

        A draw that reached no point gets the derivative 0; the others weigh as much more.
        """
        there = ~torch.isnan(losses).view(-1, self._options.unit, losses.size(1)).any(1)
        there = there.repeat_interleave(self._options.unit, 0)  # (passes, B)
        count = there.sum(1).clamp(min=1)
        means = torch.where(there, losses, 0.0).sum(1) / count
        clean = torch.where(there, self._queries.losses.cpu(), 0.0).sum(1) / count
        found = self._options.derivatives(means, clean)
        live = there.any(1)
        used = live[:: self._options.unit]
        self._derivatives = torch.where(used, found, 0.0) * len(used) / max(1, int(used.sum()))
        self._loss = float(means[live].mean()) if bool(live.any()) else float("nan")

    def _shift(self, called: CalledModule, draw: int, alpha: float) -> Action:
        """Parameters of a module point to perturbed copies while it runs."""

        def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            saved = [(p, p.data) for p in called.parameters.values()]
            try:
                with called.clean_padding() if called.lookups else nullcontext():
                    for path, p in called.parameters.items():
                        padding = called.padding.get(path)
                        p.data = shifted(p.data, self._pieces(p, draw), alpha, padding)
                    return forward(*args, **kwargs)
            finally:
                for parameter, data in saved:
                    parameter.data = data

        return action

    def _shift_all(self, draw: int, alpha: float) -> Action:
        """All parameters point to perturbed copies during the whole pass."""
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
        """Noise of each parameter of a small group."""
        if draw not in self._kept:
            self._kept.clear()
            key = (*self._queries.key, draw)
            self._kept[draw] = self._shape.fill(self._drawn, key, self._row[0])
        return self._row[1]

    @cached_property
    def _row(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Buffer for a draw of a small group, and views of it for each parameter."""
        device, size = self._shape.parameters[0].device, self._shape.offsets[-1]
        row = torch.empty(size, dtype=torch.float32, device=device)
        return row, self._shape.views(row)
