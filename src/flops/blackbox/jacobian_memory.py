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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flops.blackbox.jacobian_factors import Factors, Fit, Measured
from flops.blackbox.outputs import Outputs
from flops.errors import FlopsError
from flops.estimators.arrived import Arrived
from flops.estimators.base import (
    Estimate,
    Estimation,
    Estimator,
    Perturbation,
    PointPlan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.estimators.variance import warn_if_rounding
from flops.passes.replay import Passes
from flops.passes.selection import Selection
from flops.perturb.activations import Sites
from flops.perturb.noise import Kind, NoiseStream
from flops.subspace.report import ShapedEstimate, ShapingReport

MOST = 512  # derivatives per point in a fit, whose cost grows with their cube
POINTS = 256  # points in a fit, unless a batch has more: this step's and the latest

Name = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class QueryBatch:
    """Queries of a batch; their noise is regenerated from the key.

    Attributes:
        key: Of the noise: seed, step, group.
        ids: Points of the batch.
        draws: Number of draws per point.
        derivatives: Of the outputs along each draw, shape (total draws, K); NaN if it failed.
    """

    key: tuple[int, ...]
    ids: list[int]
    draws: list[int]
    derivatives: Tensor

    @property
    def name(self) -> Name:
        """Identifies the noise of the batch."""
        return self.key, tuple(self.ids), tuple(self.draws)

    def points(self) -> Tensor:
        """Point of each draw."""
        return torch.repeat_interleave(torch.tensor(self.ids), torch.tensor(self.draws))


@dataclass(frozen=True)
class KeptDraws:
    """Draws of a batch that are kept.

    Attributes:
        batch: The batch.
        use: Indices of the kept draws.
        points: Their points.
        number: Rank of each among its point's draws, the newest first.
    """

    batch: QueryBatch
    use: Tensor
    points: Tensor
    number: Tensor


@dataclass(frozen=True)
class RecycledEstimate:
    """The estimate of one step.

    Attributes:
        delta: Estimated gradient of every point's loss, shape (B, d).
        shaped: Its energies and errors, for allocators.
    """

    delta: Tensor
    shaped: ShapedEstimate


@dataclass(frozen=True)
class JacobianMemory:
    """Gradient estimates that recycle the queries of earlier steps.

    Args:
        kind: Distribution of the noise.
        size: Length of the parameter vector.
        unbiased: Fit the prior after the estimate instead of before it.
        newest: Stored derivatives per point, unless one step has more.
        room: Noise values kept.
    """

    kind: Kind
    size: int
    unbiased: bool
    newest: int
    room: int
    _noise: dict[Name, Tensor] = field(default_factory=dict, compare=False)

    def stream(self, key: tuple[int, ...], ids: list[int], draws: list[int]) -> NoiseStream:
        """The noise of a batch."""
        return NoiseStream(self.kind, key, ids, draws, self.size)

    def estimate(
        self, queries: Queries, derivatives: Tensor, draws: Tensor, r: Tensor
    ) -> RecycledEstimate:
        """Estimate every point's gradient and store the derivatives.

        Args:
            queries: Queries of this step.
            derivatives: Of the outputs along each draw, shape (total draws, K).
            draws: Number of draws per point, shape (B,).
            r: Derivative of each point's loss with respect to its outputs, shape (B, K).
        """
        memory = queries.memory
        batch = QueryBatch(queries.key, list(queries.ids), draws.tolist(), derivatives)
        batches = [batch, *(_read(kept) for kept in memory.get("visits", ()))]
        if any(v.derivatives.size(1) != derivatives.size(1) for v in batches):
            raise FlopsError("the number of outputs of the objective has changed")
        kept = self._kept(batches)
        if not kept:
            raise FlopsError("a step needs at least one query")
        seen, energies, place = self._measured(kept)
        now = torch.tensor([place[i] for i in queries.ids if i in place])
        before = _factors(memory.get("factors"), self.size, queries.key[0])
        moved = bool((derivatives.abs() > 0).any())
        after = before.learned(seen, now) if len(now) and moved else before
        memory["visits"] = [vars(part.batch) for part in kept]
        memory["factors"] = vars(after)
        factors = before if self.unbiased else after
        delta = torch.zeros(queries.size, self.size)
        missed = torch.zeros(queries.size)
        known = torch.tensor([b for b, i in enumerate(queries.ids) if i in place])
        if len(known):
            latest, roots = seen.at(now), energies[now].sqrt()
            fresh = latest.real & (torch.arange(latest.real.size(1)) < draws[known].unsqueeze(1))
            weights = r[known].unsqueeze(1) * roots.view(-1, 1, 1)
            delta[known], missed[known] = _gradients(
                factors, factors.fit(latest), latest, weights, fresh
            )
        along = (derivatives * r.repeat_interleave(draws, 0)).sum(1)
        arrived = Arrived.among(derivatives, batch_points(draws), queries.size)
        if arrived is not None:
            along = along[arrived.draws]
            delta[arrived.lost] = 0.0
            draws = torch.bincount(batch_points(draws)[arrived.draws], minlength=queries.size)
        whole = float(along.square().sum())
        left = float((missed * draws).sum()) / whole if whole > 0 else 0.0
        report = ShapingReport(0.0, max(0.0, 1 - left), 1.0, 1.0, ())
        error = missed * self.size / draws.clamp(min=1)
        return RecycledEstimate(delta, ShapedEstimate(missed, error, self.size, report))

    def _kept(self, batches: Sequence[QueryBatch]) -> list[KeptDraws]:
        """Draws to keep, from the newest batch to the oldest, within the limits."""
        rows, longest = 0, min(MOST, max(self.newest, *batches[0].draws))
        count: dict[int, int] = {}
        kept: list[KeptDraws] = []
        for batch in batches:
            numbers = []
            for i, draws in zip(batch.ids, batch.draws, strict=True):
                numbers.append(torch.arange(draws) + count.get(i, 0))
                count[i] = count.get(i, 0) + draws
            number = torch.cat(numbers)
            there = ~torch.isnan(batch.derivatives.sum(1))
            use = torch.nonzero((number < longest) & there).flatten()
            rows += len(use)
            if kept and rows * self.size > self.room:
                break
            if len(use):
                kept.append(KeptDraws(batch, use, batch.points()[use], number[use]))
        names = {part.batch.name for part in kept}
        for name in [n for n in self._noise if n not in names]:
            del self._noise[name]
        return kept

    def _measured(self, kept: Sequence[KeptDraws]) -> tuple[Measured, Tensor, dict[int, int]]:
        """Stored derivatives of this step's points and the latest others; energies; positions."""
        chosen: dict[int, int] = {}
        for part in kept:
            for i in part.batch.ids:
                if i not in chosen and (part is kept[0] or len(chosen) < POINTS):
                    chosen[i] = len(chosen)
        place = torch.full((max(chosen) + 1,), -1)
        place[list(chosen)] = torch.arange(len(chosen))
        step, outputs = kept[0].batch.key[1], kept[0].batch.derivatives.size(1)
        longest = 1 + max(int(part.number.max()) for part in kept)
        shape = (len(chosen), longest)
        noise, derivatives = torch.zeros(*shape, self.size), torch.zeros(*shape, outputs)
        age, real = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for part in kept:
            within = part.points < len(place)
            at = place[part.points.clamp(max=len(place) - 1)]
            mine = torch.nonzero(within & (at >= 0)).flatten()
            at, number, use = at[mine], part.number[mine], part.use[mine]
            noise[at, number] = self._noise_of(part.batch)[use]
            derivatives[at, number] = part.batch.derivatives[use]
            age[at, number] = float(step - part.batch.key[1])
            real[at, number] = True
        known = real.any(1)
        places = {i: int(n) for n, i in enumerate(torch.nonzero(known).flatten().tolist())}
        found = {i: places[n] for i, n in chosen.items() if n in places}
        noise, derivatives, age, real = noise[known], derivatives[known], age[known], real[known]
        energies = _energies(derivatives, age, real)
        derivatives /= energies.sqrt().view(-1, 1, 1)
        products = noise @ noise.transpose(1, 2)
        return Measured(noise, derivatives, age, real, products), energies, found

    def _noise_of(self, batch: QueryBatch) -> Tensor:
        """Noise of a batch's draws, regenerated after a restart."""
        if batch.name not in self._noise:
            draws = torch.tensor(batch.draws)
            place = torch.repeat_interleave(torch.arange(len(draws)), draws)
            number = torch.cat([torch.arange(d) for d in batch.draws])
            stream = self.stream(batch.key, batch.ids, batch.draws)
            self._noise[batch.name] = stream.rows(place, number).clone()
        return self._noise[batch.name]


@dataclass(frozen=True)
class RecycledLikelihoodRatio(Estimator):
    """Likelihood ratio on the outputs of a black box, with Jacobian memory.

    Args:
        options: Noise scale, baseline and kind of noise.
        outputs: What the objective returns besides the losses.
        size: Length of the parameter vector.
    """

    options: LikelihoodRatio
    outputs: Outputs
    size: int
    known: JacobianMemory = field(init=False)

    def __post_init__(self) -> None:
        """Check the options."""
        shaping = self.options.shaping
        if shaping is None:
            raise FlopsError("outputs need shaped noise: pass shaping=Shaping() to the estimator")
        if self.options.noise == "orthogonal":  # leave-one-out residuals need independent draws
            raise FlopsError("outputs need independent draws: use noise='gaussian'")
        if shaping.explore is not None or shaping.decay is not None:
            raise FlopsError(
                "with outputs all queries are isotropic: leave explore and decay unset"
            )
        known = JacobianMemory(
            self.options.noise,
            self.size,
            shaping.unbiased,
            self.outputs.newest,
            self.outputs.room,
        )
        object.__setattr__(self, "known", known)

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return self.options.unit

    def check(self, selection: Selection) -> None:
        """As `LikelihoodRatio`."""
        self.options.check(selection)

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> Sites:
        """As `LikelihoodRatio`."""
        return self.options.bind(selection, passes, reuse)

    def begin(self, binding: Sites, queries: Queries, runner: Runner) -> Estimation:
        """One step."""
        return _Recycled(self, binding, queries)


class _Recycled(Estimation):
    """Derivatives of all outputs along isotropic draws, combined with those of earlier batches."""

    def __init__(
        self, estimator: RecycledLikelihoodRatio, binding: Sites, queries: Queries
    ) -> None:
        self._estimator, self._options = estimator, estimator.options
        self._binding, self._queries = binding, queries
        assert queries.view is not None
        self._view = queries.view
        self._draws = queries.counts // self._options.unit
        self._stream = estimator.known.stream(queries.key, queries.ids, self._draws.tolist())
        self._plan: PointPlan | None = PointPlan(queries.counts, self._options.unit)
        self._outputs: list[Tensor] = []
        self._size = queries.size
        self._derivatives, self._points = torch.empty(0), torch.empty(0)

    def plan(self) -> PointPlan | None:
        """One round."""
        plan, self._plan = self._plan, None
        return plan

    def ask(self, rows: Rows) -> Perturbation:
        """Isotropic noise on the parameters."""
        unit = self._options.unit
        z = self._stream.rows(rows.points[::unit], rows.draws[::unit])
        signed = z if unit == 1 else torch.stack([z, -z], 1).flatten(0, 1)
        edits = self._binding.edits(signed, self._options.scale)
        return Perturbation(self._binding.query_prefix, edits=edits)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Derivatives of the loss, for allocators; those of the outputs are stored."""
        assert results.outputs is not None
        clean = self._view.clean[rows.points]
        self._outputs.append(self._options.derivatives(results.outputs, clean, torch.float32))
        clean = self._queries.losses[rows.points]
        return self._options.derivatives(results.losses, clean, torch.float32)

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Estimate every point's gradient and update the memory."""
        queries, estimator = self._queries, self._estimator
        arrived = Arrived.among(values, points, self._size)
        if arrived is not None:
            values, points, self._size = values[arrived.draws], points[arrived.draws], arrived.size
        self._derivatives, self._points = values, points
        outputs, r = torch.cat(self._outputs), self._view.residuals
        self._found = estimator.known.estimate(queries, outputs, self._draws, r)
        warn_if_rounding(queries, values * self._options.scale)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The local VJP of an identity."""
        deltas = self._binding.split(self._found.delta * (scale / self._size))
        runner.local_vjps(self._binding, deltas, sink)

    def finish(self) -> Estimate:
        """Derivatives, energies and errors."""
        size = float(self._estimator.size)
        return Estimate(self._derivatives, self._points, size, shaped=self._found.shaped)


def batch_points(draws: Tensor) -> Tensor:
    """Point of each draw, by its position in the batch."""
    return torch.repeat_interleave(torch.arange(len(draws)), draws)


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


def _energies(derivatives: Tensor, age: Tensor, real: Tensor) -> Tensor:
    """Mean square of each point's newest derivatives, summed over the outputs.

    Bounded from below by a fraction of the mean over all its derivatives, which it also scales.
    """
    newest = torch.where(real, age, torch.inf).amin(1, keepdim=True)
    squares = derivatives.square().sum(2)

    def mean(of: Tensor) -> Tensor:
        return torch.where(of, squares, 0.0).sum(1) / of.sum(1)

    return torch.maximum(mean(real & (age == newest)), 0.01 * mean(real)).clamp(min=1e-30)


def _read(kept: Mapping[str, Any]) -> QueryBatch:
    return QueryBatch(
        tuple(kept["key"]), list(kept["ids"]), list(kept["draws"]), kept["derivatives"]
    )


def _factors(kept: Mapping[str, Any] | None, size: int, seed: int) -> Factors:
    if kept is None:
        return Factors.unknown(size, seed)
    return Factors(kept["directions"], float(kept["floor"]), float(kept["drift"]))
