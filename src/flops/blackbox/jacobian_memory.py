"""Jacobian memory: queries of earlier steps reduce the variance of this step's estimate.

The gradient of a point's loss is J^T r, with J the Jacobian of its outputs and r the derivative of
the loss with respect to them. r is known in every step; J changes little from one visit of a point
to the next. So directional derivatives of earlier batches are informative about J, and so are those
of other points, through a shared low-rank prior (`flops.blackbox.jacobian_factors`). All queries
are isotropic. With the posterior mean J' and n queries of this step,

    g_j = J'_j^T r_j + (1/n) sum_i h_ji z_ji

where h are leave-one-out residuals: a derivative minus its prediction from all others. J' in the
first term is the mean over fits that leave one query out, so the estimate is unbiased whatever the
memory holds, provided that the prior was fitted to earlier steps only (``Shaping(unbiased=True)``).
By default the prior is fitted to this step's derivatives too, which reduces the variance further
and shrinks the estimate a little.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flops.blackbox.jacobian_factors import Factors, Fit, Measured
from flops.blackbox.outputs import Outputs
from flops.blackbox.stored_queries import Name, QueryBatch, StoredQueries
from flops.errors import FlopsError
from flops.estimators.arrived import Arrived
from flops.estimators.base import Estimation, Queries, Runner
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.estimators.shaped_activations import ShapedActivations
from flops.passes.loss_view import LossView
from flops.perturb.activations import Sites
from flops.subspace.basis import Space
from flops.subspace.config import Shaping
from flops.subspace.report import ShapedEstimate, ShapingReport


class RecycledStep:
    """One step: isotropic draws, estimated together with those of earlier batches.

    Stands in for `flops.subspace.step.ShapedStep`, whose arguments follow the first.

    Args:
        stored: The memory.
        space: Space of the noise.
        shaping: Options.
        memory: State of earlier steps; replaced by `collect`.
        counts: Queries of each point, shape (B,).
        losses: Clean losses, shape (B,).
        decide: Called with discrete decisions; there are none.
        view: What the loss reads of the outputs.
        ranks: Other ranks; there are none.

    Attributes:
        delta: Estimated gradient of every point's loss, shape (B, d).
        isotropic: Mask of the isotropic draws: all.
        shaped: Energies and errors of delta, for allocators.
    """

    delta: Tensor
    isotropic: Tensor
    shaped: ShapedEstimate

    def __init__(
        self,
        stored: StoredQueries,
        space: Space,
        shaping: Shaping,
        memory: dict[str, Any],
        counts: Tensor,
        losses: Tensor,
        decide: object,
        view: LossView | None,
        *ranks: object,
    ) -> None:
        assert view is not None
        self._stored, self._space, self._shaping = stored, space, shaping
        self._memory, self._residuals = memory, view.residuals
        self._draws = counts // space.unit
        self._first = self._draws.cumsum(0) - self._draws
        self._name: Name = (space.key, tuple(space.ids), tuple(self._draws.tolist()))

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws, shape (draws, d)."""
        return self._stored.noise(self._name, self._space)[self._first[points] + draws]

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor:
        """Noise has unit variance already."""
        return derivatives

    def collect(self, derivatives: Tensor, points: Tensor, outputs: Tensor | None) -> None:
        """Estimate every point's gradient and store the derivatives.

        Args:
            derivatives: Of the losses along each draw, shape (total draws,).
            points: Point of each draw.
            outputs: Derivatives of the outputs, shape (total draws, K).
        """
        assert outputs is not None
        space, memory, draws = self._space, self._memory, self._draws
        batch = QueryBatch(space.key, list(space.ids), draws.tolist(), outputs)
        batches = [batch, *map(QueryBatch.from_memory, memory.get("visits", ()))]
        if any(b.derivatives.size(1) != outputs.size(1) for b in batches):
            raise FlopsError("the number of outputs of the objective has changed")
        kept = self._stored.kept(batches, space.dimensions)
        if not kept:
            raise FlopsError("a step needs at least one query")
        seen, energies, place = self._stored.measured(kept, space)
        known = torch.tensor([b for b, i in enumerate(space.ids) if i in place])
        now = torch.tensor([place[i] for i in space.ids if i in place])
        before = Factors.from_memory(memory.get("factors"), space.dimensions, space.key[0])
        moved = bool((outputs.abs() > 0).any())
        after = before.learned(seen, now) if len(now) and moved else before
        memory["visits"] = [vars(part.batch) for part in kept]
        memory["factors"] = vars(after)
        factors = before if self._shaping.unbiased else after
        self.delta = torch.zeros(space.size, space.dimensions)
        missed = torch.zeros(space.size)
        if len(known):
            latest, roots = seen.at(now), energies[now].sqrt()
            fresh = latest.real & (torch.arange(latest.real.size(1)) < draws[known].unsqueeze(1))
            weights = self._residuals[known].unsqueeze(1) * roots.view(-1, 1, 1)
            self.delta[known], missed[known] = _gradients(
                factors, factors.fit(latest), latest, weights, fresh
            )
        self.isotropic = torch.ones(len(points), dtype=torch.bool)
        arrived = Arrived.among(derivatives, points, space.size)
        if arrived is not None:
            derivatives = derivatives[arrived.draws]
            self.delta[arrived.lost] = 0.0
            draws = torch.bincount(points[arrived.draws], minlength=space.size)
        whole = float(derivatives.square().sum())
        left = float((missed * draws).sum()) / whole if whole > 0 else 0.0
        report = ShapingReport(0.0, max(0.0, 1 - left), 1.0, 1.0, ())
        error = missed * space.dimensions / draws.clamp(min=1)
        self.shaped = ShapedEstimate(missed, error, space.dimensions, report)


@dataclass(frozen=True)
class RecycledLikelihoodRatio(LikelihoodRatio):
    """Likelihood ratio on the outputs of a black box, with Jacobian memory."""

    stored: StoredQueries = field(kw_only=True)

    @classmethod
    def of(cls, options: LikelihoodRatio, outputs: Outputs) -> RecycledLikelihoodRatio:
        """The same estimator, which recycles queries."""
        given = {option.name: getattr(options, option.name) for option in fields(options)}
        return cls(**given, stored=StoredQueries(outputs.newest, outputs.room))

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.noise == "orthogonal":  # leave-one-out residuals need independent draws
            raise FlopsError(
                "stored outputs need independent draws: use noise='gaussian', or Outputs(newest=0)"
            )
        shaping = self.shaping
        if shaping is not None and (shaping.explore is not None or shaping.decay is not None):
            raise FlopsError(
                "with stored outputs all queries are isotropic: leave explore and decay unset, or "
                "use Outputs(newest=0)"
            )

    def begin(self, binding: Sites, queries: Queries, runner: Runner) -> Estimation:
        """One step."""
        assert self.shaping is not None
        step = partial(RecycledStep, self.stored)
        return ShapedActivations(self, self.shaping, binding, queries, runner, step)


def _gradients(
    factors: Factors, fit: Fit, seen: Measured, weights: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the points' losses, and the energy that the fit leaves unexplained."""
    count = fresh.sum(1, keepdim=True).clamp(min=1)
    alpha = (fit.alpha * weights).sum(2)
    held = torch.where(fresh, (fit.held_out * weights).sum(2), 0.0)
    without = alpha - (fit.inverse @ (held / count).unsqueeze(2)).squeeze(2)
    rows = (without.unsqueeze(1) @ seen.noise).squeeze(1)
    mean = factors.times(rows) / seen.derivatives.size(2)
    left = ((held / count).unsqueeze(1) @ seen.noise).squeeze(1)
    return mean + left, held.square().sum(1) / count.squeeze(1)
