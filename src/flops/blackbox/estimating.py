"""Estimators on a vector of parameters behind which nothing is known.

Likelihood ratio on an identity target, ES and SPSA are one thing here: every row has parameters of
its own, theta + sigma z, and slope w = (l - b) / sigma times z is averaged over a point's draws:

    g = (1/B) sum_j (1/A_j) sum_i w_ij z_ij

They differ in the noise (Gaussian, signs, orthogonal directions), in the baseline (the clean loss
or pairs) and in whether the batch shares its draws. Shaped noise asks where earlier queries found
the gradient. Instead of running a model, the work of an estimate yields a `Question` and is sent
the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flops.blackbox.jacobian_memory import Remembering
from flops.blackbox.objective import Question
from flops.blackbox.outputs import Outputs
from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work
from flops.engine.queries import Estimate, Queries
from flops.engine.rows import Rows
from flops.errors import FlopsError
from flops.estimators import ES, SPSA, LikelihoodRatio
from flops.estimators.likelihood_ratio import accumulate
from flops.estimators.parameter_noise import ParameterNoise
from flops.perturb.random import Kind, NoiseStream, fill, words
from flops.subspace.measurements import Space
from flops.subspace.moments import Grid
from flops.subspace.step import shaped_queries

Options = LikelihoodRatio | ES | SPSA


@dataclass(frozen=True)
class VectorEstimator:
    """An estimator of `flops.estimators` on a vector, as the allocation knows estimators.

    Args:
        options: Which one, and its settings; what it says of targets does not matter here.
        theta: The vector.
        parts: Name and shape of each part of the vector, which shaped noise learns apart.
        outputs: What shaped noise may read from answers beside the losses.
    """

    options: Options
    theta: nn.Parameter
    parts: Sequence[tuple[str, tuple[int, ...]]]
    outputs: Outputs | None = None
    remembering: Remembering | None = field(default=None, init=False)

    whole_model = True

    def __post_init__(self) -> None:
        """Check that it is an estimator that asks."""
        if not isinstance(self.options, LikelihoodRatio | ParameterNoise):
            raise FlopsError(
                f"a black box is asked by LikelihoodRatio, ES or SPSA, not by {self.options!r}"
            )
        if self.outputs is None:
            return
        shaping = self.options.shaping
        if shaping is None:
            raise FlopsError(
                "outputs are read by shaped noise only: give the estimator a Shaping()"
            )
        if self.kind == "orthogonal":  # held-out residuals need draws that do not know each other
            raise FlopsError("outputs need independent draws: use noise='gaussian'")
        if shaping.explore is not None or shaping.decay is not None:
            raise FlopsError("with outputs all queries are isotropic: leave explore and decay open")
        known = Remembering(self.kind, self.theta.numel(), shaping.unbiased)
        object.__setattr__(self, "remembering", known)

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return self.options.unit

    @property
    def minimum_queries(self) -> int:
        """One draw per point."""
        return self.options.unit

    @property
    def shared(self) -> bool:
        """Whether all points of the batch see the same draw."""
        return self.options.shared

    @property
    def reads_clean(self) -> bool:
        """Whether the clean losses are asked for: pairs of the whole batch need none."""
        return bool(getattr(self.options, "reads_clean", True))

    @property
    def kind(self) -> Kind:
        """Noise of draws that are a point's own."""
        if isinstance(self.options, LikelihoodRatio):
            return self.options.noise
        return self.options._isotropic if self.options.shaping else "rademacher"

    def check(self, group: ResolvedGroup) -> None:
        """Any vector will do."""

    def bind(self, group: ResolvedGroup, passes: Any, reuse: bool) -> None:
        """There is no model."""

    def estimate(self, binding: Any, queries: Queries) -> Estimate:
        """Not without answers: `work` asks for them."""
        raise NotImplementedError("a black box answers questions: use work()")

    def work(self, binding: Any, queries: Queries) -> Work[Estimate]:
        """Ask, and average slope times noise.

        Args:
            binding: Answers of the clean pass, for estimators that read outputs.
            queries: Of this step.
        """
        if self.remembering is not None:
            return (yield from self._remembered(self.remembering, binding, queries))
        if self.options.shaping is not None:
            return (yield from self._shaped(queries))
        estimate = yield from (self._together if self.shared else self._apart)(queries)
        queries.warn_if_rounding(_changes(estimate.slopes) * self.options.sigma, estimate.loss)
        return estimate

    def _apart(self, queries: Queries) -> Work[Estimate]:
        """Every point has draws of its own."""
        size, once = self.theta.numel(), slice(None, None, self.unit)
        draws = (queries.counts // self.unit).tolist()
        stream = NoiseStream(self.kind, queries.key, queries.ids, draws, size)
        delta = torch.zeros(queries.size, size)
        slopes = []
        for rows in queries.chunks(self.unit):
            at = rows.points[once]
            z = stream.rows(at, rows.draws[once])
            w = yield from self._ask(queries, rows, z)
            accumulate(delta, at, rows.weights[once].float() * w, z)
            slopes.append(w)
        w, points = queries.everyone(slopes, self.unit, torch.float32)
        directions = size if self.kind == "orthogonal" else 0
        return Estimate({self.theta: delta.mean(0)}, w, points, float(size), directions)

    def _together(self, queries: Queries) -> Work[Estimate]:
        """The batch shares its draws: one parameter vector for all points at a time."""
        assert isinstance(self.options, ParameterNoise)
        theta, batch = self.theta.detach(), queries.size
        ids = torch.tensor(queries.ids)
        gradient, means, slopes = torch.zeros_like(theta), [], []
        for draw in range(int(queries.counts[0]) // self.unit):
            z = fill(self.options.noise, 1, theta.numel(), words(*queries.key, draw))[0]
            losses = []
            for sign in (1.0, -1.0)[: self.unit]:
                shifted = torch.add(theta, z, alpha=sign * self.options.sigma)
                queries.ledger.rows += batch
                queries.ledger.queries += batch
                answer = yield Question(shifted.expand(batch, -1), ids)
                losses.append(answer[:, 0].mean())
            clean = queries.losses.mean()
            w = self.options._slopes(torch.stack(losses), clean)
            gradient.add_(z, alpha=float(w))
            means += losses
            slopes.append(w)
        loss = float(torch.stack(means).mean())
        found = {self.theta: gradient / len(slopes)}
        return Estimate(found, torch.cat(slopes), None, float(theta.numel()), loss=loss)

    def _shaped(self, queries: Queries) -> Work[Estimate]:
        """Where earlier queries found the gradient."""
        assert self.options.shaping is not None

        def ask(rows: Rows, z: Tensor) -> Work[Tensor]:
            return self._ask(queries, rows, z)

        grids, names = self._grids()
        sigma, shaping = self.options.sigma, self.options.shaping
        space = Space(grids, self.unit, self.kind, torch.float32, ask, sigma, names, recorded=True)
        found = yield from shaped_queries(space, shaping, queries)
        queries.warn_if_rounding(_changes(found.slopes[found.isotropic]) * sigma)
        size = float(self.theta.numel())
        gradients = {self.theta: found.delta.mean(0)}
        return Estimate(gradients, found.slopes, found.points, size, shaped=found.shaped)

    def _remembered(
        self, remembering: Remembering, clean: Tensor, queries: Queries
    ) -> Work[Estimate]:
        """What outputs do is remembered from step to step."""
        assert self.outputs is not None
        at_clean = self.outputs.read(clean)
        draws, once = queries.counts // self.unit, slice(None, None, self.unit)
        stream = remembering.stream(queries.key, queries.ids, draws.tolist())
        losses, slopes = [], []
        for rows in queries.chunks(self.unit):
            z = stream.rows(rows.points[once], rows.draws[once])
            answer = yield from self._answer(queries, rows, z)
            losses.append(self._slopes(answer[:, 0], queries.losses[rows.points]))
            slopes.append(self._slopes(self.outputs.read(answer), at_clean[rows.points]))
        w, points = queries.everyone(losses, self.unit, torch.float32)
        r = self.outputs.derivative(clean, torch.tensor(queries.ids))
        found = remembering.estimate(queries, torch.cat(slopes), draws, r)
        queries.warn_if_rounding(_changes(w) * self.options.sigma)
        gradients = {self.theta: found.delta.mean(0)}
        return Estimate(gradients, w, points, float(self.theta.numel()), shaped=found.shaped)

    def _grids(self) -> tuple[list[Grid], list[str]]:
        grids, offset = [], 0
        for _, shape in self.parts:
            positions = int(torch.Size(shape[:-1]).numel()) if len(shape) > 1 else 1
            grids.append(Grid(offset, positions, shape[-1]))
            offset += positions * shape[-1]
        return grids, [name for name, _ in self.parts]

    def _ask(self, queries: Queries, rows: Rows, z: Tensor) -> Work[Tensor]:
        """Slopes of the draws of some rows."""
        answer = yield from self._answer(queries, rows, z)
        return self._slopes(answer[:, 0], queries.losses[rows.points])

    def _answer(self, queries: Queries, rows: Rows, z: Tensor) -> Work[Tensor]:
        """Columns of some rows, given the noise of their draws; charged."""
        signed = z.repeat_interleave(self.unit, 0) * rows.signs.unsqueeze(1)
        parameters = torch.add(self.theta.detach(), signed, alpha=self.options.sigma)
        queries.ledger.rows += len(rows)
        queries.ledger.queries += len(rows)
        ids = torch.tensor(queries.ids)
        answer: Tensor = yield Question(parameters, ids[rows.points])
        return answer

    def _slopes(self, values: Tensor, clean: Tensor) -> Tensor:
        """Of losses or outputs, by draw."""
        if isinstance(self.options, LikelihoodRatio):
            return self.options._difference(values, clean) / self.options.sigma
        return self.options._slopes(values, clean)


def _changes(slopes: Tensor) -> Tensor:
    """Slopes that are not 0, if there are any: an error of 0 or 1 has few, and none is rounded."""
    changes = slopes[slopes != 0]
    return changes if len(changes) else slopes
