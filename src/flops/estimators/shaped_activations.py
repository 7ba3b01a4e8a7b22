"""Likelihood ratio with shaped noise: queries along learned directions of the noise sites.

delta is the posterior estimate from isotropic and shaped queries (`flops.subspace.step`), followed
by the same local VJPs as under isotropic noise. Where the loss is a function of outputs that the
engine sees, their derivatives J z are learned from, too, and the directional derivative of the loss
is r^T J z, with r its derivative at the outputs: free of the cancellation between two losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from flops.estimators.arrived import Arrived
from flops.estimators.base import (
    Estimate,
    Estimation,
    Perturbation,
    PointPlan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.variance import jacobian_energy, warn_if_rounding
from flops.passes.loss_view import LossView
from flops.passes.ranks import Replicas
from flops.perturb.activations import Sites
from flops.perturb.random import Kind, signed
from flops.subspace.basis import Space, site_grids
from flops.subspace.config import Shaping
from flops.subspace.report import ShapedEstimate
from flops.subspace.step import ShapedStep, full_precision

UNLIKE = 0.2  # derivatives by outputs and by losses may differ, relatively


class ActivationNoise(Protocol):
    """Options of the estimator that the draws use."""

    @property
    def scale(self) -> float: ...  # noqa: D102

    @property
    def unit(self) -> int: ...  # noqa: D102

    @property
    def noise(self) -> Kind: ...  # noqa: D102

    @property
    def reads_outputs(self) -> bool: ...  # noqa: D102

    def derivatives(self, losses: Tensor, clean: Tensor, dtype: torch.dtype) -> Tensor: ...  # noqa: D102


class Step(Protocol):
    """Which directions are measured, and what follows: as `flops.subspace.step.ShapedStep`."""

    delta: Tensor
    isotropic: Tensor
    shaped: ShapedEstimate

    def rows(self, points: Tensor, draws: Tensor) -> Tensor: ...  # noqa: D102

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor: ...  # noqa: D102

    def collect(self, derivatives: Tensor, points: Tensor, outputs: Tensor | None) -> None: ...  # noqa: D102


class ShapedActivations(Estimation):
    """delta is the posterior estimate from isotropic and shaped queries.

    Args:
        options: Options of the estimator.
        shaping: Those of its noise.
        binding: The noise sites.
        queries: The group's queries.
        runner: Services of the engine.
        step: Makes the step; takes the arguments of `ShapedStep`.
    """

    partial = True

    def __init__(
        self,
        options: ActivationNoise,
        shaping: Shaping,
        binding: Sites,
        queries: Queries,
        runner: Runner,
        step: Callable[..., Step] = ShapedStep,
    ) -> None:
        self._options, self._binding, self._queries = options, binding, queries
        self.dtype = torch.promote_types(torch.float32, binding.dtype)
        self._device = binding.sites[0].leaf.device
        self._view = queries.view if options.reads_outputs else None
        grids, mask = site_grids(
            binding, shaping.mask, runner.passes, queries.memory, runner.replicas
        )
        names = [binding.structure.calls[site.call].name for site in binding.sites]
        space = Space(
            grids,
            options.unit,
            options.noise,
            self.dtype,
            options.scale,
            names,
            queries.key,
            queries.ids,
            mask,
            self._device,
        )
        self._step = step(
            space,
            shaping,
            queries.memory,
            queries.counts,
            queries.losses,
            queries.decide,
            self._view,
            runner.replicas,
            runner.fitters,
        )
        self._plan: PointPlan | None = PointPlan(queries.counts, options.unit)
        self._derivatives, self._points = torch.empty(0), torch.empty(0)
        self._factors = 0.0
        self._features: list[Tensor] = []
        self._size = queries.size
        if self._view is not None:
            self.width = 2 if runner.world_size == 1 else 2 + self._view.size

    def plan(self) -> PointPlan | None:
        """One round."""
        plan, self._plan = self._plan, None
        return plan

    def ask(self, rows: Rows) -> Perturbation:
        """Isotropic noise and directions of the basis, on the outputs of the targets."""
        once = slice(None, None, self._options.unit)
        z = self._step.rows(rows.points[once], rows.draws[once])
        with torch.inference_mode():
            edits = self._binding.edits(signed(z, self._options.unit), self._options.scale)
        evaluate = None if self._view is None else partial(_with_outputs, self._view)
        return Perturbation(self._binding.query_prefix, edits=edits, evaluate=evaluate)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Directional derivatives along unit vectors: of the loss, and of what it reads."""
        once = slice(None, None, self._options.unit)
        points, draws = rows.points[once], rows.draws[once]
        clean = self._queries.losses[rows.points].cpu()
        w = self._options.derivatives(results.losses.cpu(), clean, self.dtype)
        if self._view is None or results.outputs is None:
            return self._step.scaled(points, draws, w)
        with full_precision(results.outputs.device):
            before = self._view.clean[rows.points]
            change = self._options.derivatives(results.outputs, before, before.dtype)
            own, features = self._view.derivatives(change, points)
        w = torch.stack([w, own.cpu().to(self.dtype)], 1)
        if self.width == 2:  # nobody else needs them: they stay on the device
            self._features.append(self._step.scaled(points, draws, features))
            return self._step.scaled(points, draws, w)
        return self._step.scaled(points, draws, torch.cat([w, features.cpu().to(self.dtype)], 1))

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Estimate every point's delta, and update the subspace."""
        features, clean = None, self._queries.losses.abs().median()
        if self._view is not None:
            losses, values, rest = values[:, 0], values[:, 1], values[:, 2:]
            if self._view.known or _agree(values, losses, runner.replicas):
                features = torch.cat(self._features) if self.width == 2 else rest
            else:
                values = losses
        self._features = []
        self._step.collect(values, points, features)
        # Ranks may round differently, and must agree.
        withheld = torch.tensor(float(self._step.shaped.report.withheld))
        self.withheld = bool(runner.replicas.max(runner.max(withheld)) > 0)
        isotropic = self._step.isotropic  # along a known direction it may be 0
        failed = bool(torch.isnan(values).any())  # rows of a black box
        arrived = Arrived.among(values, points, self._size) if failed else None
        if arrived is not None:
            values, points, self._size = values[arrived.draws], points[arrived.draws], arrived.size
            isotropic = isotropic[arrived.draws]
            if features is not None:
                features = features[arrived.draws.to(features.device)]
        self._derivatives, self._points = values, points
        if features is None or self._view is None:
            differences = (values[isotropic] * self._options.scale).to(clean.dtype)
            warn_if_rounding(self._queries, differences)
        else:
            change = features[isotropic.to(features.device)].norm(dim=1) * self._options.scale
            largest = float(self._view.clean.abs().max())
            warn_if_rounding(self._queries, change.to(self._view.clean.dtype), largest, "output")

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The local VJPs of all targets."""
        binding, size = self._binding, self._queries.size
        self._factors = jacobian_energy(binding, self._queries, runner)
        deltas = binding.split(self._step.delta * (scale / self._size))
        own = runner.share(size) if runner.world_size > 1 else None
        runner.local_vjps(binding, deltas, sink, own)

    def finish(self) -> Estimate:
        """Directional derivatives, energies and errors."""
        return Estimate(self._derivatives, self._points, self._factors, shaped=self._step.shaped)


def _with_outputs(view: LossView, run: Callable[..., Tensor]) -> RowResults:
    """Losses of a pass, and what they read of its outputs."""
    seen: list[Tensor] = []
    losses = run(see=lambda outputs, _: seen.append(view.read(outputs)))
    return RowResults(losses, seen[0])


def _agree(found: Tensor, losses: Tensor, replicas: Replicas) -> bool:
    """Whether derivatives by the outputs are those of the losses, up to curvature and rounding.

    They are not if the loss function detaches some outputs, or reads anything else.
    """
    squares, error = found.double().square(), (losses - found).double()
    parts = (squares, found * error, squares * error.square())
    (sums,) = replicas.sum([torch.stack([part.sum() for part in parts])])
    whole, product, spread = sums.tolist()
    return bool(whole > 0 and abs(product) <= UNLIKE * whole + 4 * spread**0.5)
