"""Shaped noise for a black box that shows its outputs: no query is forgotten.

The gradient of a point's loss is J^T r, with J the Jacobian of its outputs and r the derivative of
the loss by these. r changes with every step and is known; J hardly changes from one visit of a
point to the next. So the slopes of earlier visits still tell about it, and so do those of other
points, through directions that all of them share (`flops.blackbox.factors`). Queries are
isotropic: each of them also measures what is not known yet. With the posterior mean J' and n
queries of this step,

    g_j = J'_j^T r_j + (1/n) sum_i h_ji z_ji

where h are held-out residuals: what a slope differs by from what all others say. The more is known,
the less noise is left. J' in the first part is the mean over fits that leave one query out, so
that the mean of g_j is right whatever is remembered, as long as the shared directions are those of
the steps before (``Shaping(unbiased=True)``); by default they are fitted to this step's slopes too,
which leaves less noise and shortens the estimate a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flops.blackbox.factors import Factors, Fit, Measured
from flops.noise import Kind, NoiseStream
from flops.queries import Queries, Shaped
from flops.step_report import ShapingReport

NEWEST = 96  # slopes of a point that are remembered, unless one step has more: cubic cost
ROOM = 1 << 27  # noise values that are looked at, 512 MB


@dataclass(frozen=True)
class Visit:
    """Queries of a batch; their noise follows from the key.

    Attributes:
        key: Of the noise: seed, step, group.
        ids: Points of the batch.
        draws: How many each of them made.
        slopes: Of the outputs along each draw, shape (draws in all, K).
    """

    key: tuple[int, ...]
    ids: list[int]
    draws: list[int]
    slopes: Tensor

    def points(self) -> Tensor:
        """Point of each draw."""
        return torch.repeat_interleave(torch.tensor(self.ids), torch.tensor(self.draws))


@dataclass(frozen=True)
class Recalled:
    """What a step's estimate is.

    Attributes:
        delta: Estimated gradient of every point's loss, shape (B, d).
        shaped: Its energies and errors, for allocators.
    """

    delta: Tensor
    shaped: Shaped


@dataclass(frozen=True)
class Remembering:
    """Estimates with all that earlier steps have asked.

    Args:
        kind: Of the noise.
        size: Numbers of a parameter vector.
        unbiased: Fit the shared directions behind the estimate instead of before it.
    """

    kind: Kind
    size: int
    unbiased: bool = False
    _noise: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False)

    def stream(self, key: tuple[int, ...], ids: list[int], draws: list[int]) -> NoiseStream:
        """The noise of a visit."""
        return NoiseStream(self.kind, key, ids, draws, self.size)

    def estimate(self, queries: Queries, slopes: Tensor, draws: Tensor, r: Tensor) -> Recalled:
        """Estimate every point's gradient, and remember.

        Args:
            queries: Of this step.
            slopes: Of the outputs along each draw, shape (draws in all, K).
            draws: Of each point, shape (B,).
            r: Derivative of each point's loss by its outputs, shape (B, K).
        """
        memory = queries.memory
        visit = Visit(queries.key, list(queries.ids), draws.tolist(), slopes)
        visits = [visit, *(_read(kept) for kept in memory.get("visits", ()))]
        seen, energies, place, kept = self._measured(visits)
        now = torch.tensor([place[i] for i in queries.ids if i in place])
        before = _factors(memory.get("factors"), self.size, queries.key[0])
        after = before.learned(seen, now) if len(now) and float(slopes.abs().max()) > 0 else before
        memory["visits"] = [vars(v) for v in kept]
        memory["factors"] = vars(after)
        factors = before if self.unbiased else after
        delta = torch.zeros(queries.size, self.size)
        missed = torch.zeros(queries.size)
        known = torch.tensor([b for b, i in enumerate(queries.ids) if i in place])
        if len(known):
            latest, roots = seen.at(now), energies[now].sqrt()
            fresh = torch.arange(latest.real.size(1)) < draws[known].unsqueeze(1)
            weights = r[known].unsqueeze(1) * roots.view(-1, 1, 1)
            delta[known], missed[known] = _gradients(
                factors, factors.fit(latest), latest, weights, fresh
            )
        whole = float(((slopes * r.repeat_interleave(draws, 0)).sum(1)).square().sum())
        left = float((missed * draws).sum()) / whole if whole > 0 else 0.0
        report = ShapingReport(0.0, max(0.0, 1 - left), 1.0, 1.0, ())
        error = missed * self.size / draws.clamp(min=1)
        return Recalled(delta, Shaped(missed, error, self.size, report))

    def _measured(
        self, visits: Sequence[Visit]
    ) -> tuple[Measured, Tensor, dict[int, int], list[Visit]]:
        """What is remembered by point, their energies and places, and the visits worth keeping."""
        step, most = visits[0].key[1], max(len(visits[0].slopes), ROOM // self.size)
        newest = max(NEWEST, *visits[0].draws)
        count: dict[int, int] = {}
        kept, parts, rows = [], [], 0
        for visit in visits:
            points, number = visit.points(), torch.zeros(len(visit.slopes), dtype=torch.long)
            begin = 0
            for i, draws in zip(visit.ids, visit.draws, strict=True):
                number[begin : begin + draws] = torch.arange(draws) + count.get(i, 0)
                count[i] = count.get(i, 0) + draws
                begin += draws
            use = torch.nonzero(number < newest).flatten()
            rows += len(use)
            if rows > most:
                break
            if len(use):
                kept.append(visit)
                age = torch.full((len(use),), float(step - visit.key[1]))
                noise = self._noise_of(visit)[use]
                parts.append((points[use], number[use], noise, visit.slopes[use], age))
        for key in [k for k in self._noise if k not in {v.key for v in kept}]:
            del self._noise[key]
        if not parts:
            raise ValueError("a step without queries")
        points, number, noise, slopes, age = (torch.cat(p) for p in zip(*parts, strict=True))
        names, at = points.unique(return_inverse=True)
        shape = (len(names), int(number.max()) + 1)
        real = torch.zeros(shape, dtype=torch.bool)
        real[at, number] = True
        last = age == torch.full((len(names),), torch.inf).scatter_reduce(0, at, age, "amin")[at]
        energies = _energies(slopes[last], at[last], len(names))
        padded_noise = torch.zeros(*shape, self.size)
        padded_noise[at, number] = noise
        padded_slopes = torch.zeros(*shape, slopes.size(1))
        padded_slopes[at, number] = slopes / energies[at].sqrt().unsqueeze(1)
        padded_age = torch.zeros(shape)
        padded_age[at, number] = age
        products = padded_noise @ padded_noise.transpose(1, 2)
        seen = Measured(padded_noise, padded_slopes, padded_age, real, products)
        return seen, energies, {int(n): i for i, n in enumerate(names)}, kept

    def _noise_of(self, visit: Visit) -> Tensor:
        """Noise of a visit's draws: kept, or made again behind a restart."""
        if visit.key not in self._noise:
            draws = torch.tensor(visit.draws)
            place = torch.repeat_interleave(torch.arange(len(draws)), draws)
            number = torch.cat([torch.arange(d) for d in visit.draws])
            stream = self.stream(visit.key, visit.ids, visit.draws)
            self._noise[visit.key] = stream.rows(place, number).clone()
        return self._noise[visit.key]


def _gradients(
    factors: Factors, fit: Fit, seen: Measured, weights: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the points' losses, and what this step's slopes leave of their energy."""
    count = fresh.sum(1, keepdim=True).clamp(min=1)
    alpha = (fit.alpha * weights).sum(2)
    held = torch.where(fresh, (fit.held_out * weights).sum(2), 0.0)
    without = alpha - (fit.inverse @ (held / count).unsqueeze(2)).squeeze(2)
    rows = (without.unsqueeze(1) @ seen.noise).squeeze(1)
    mean = factors.times(rows) / seen.slopes.size(2)
    left = ((held / count).unsqueeze(1) @ seen.noise).squeeze(1)
    return mean + left, held.square().sum(1) / count.squeeze(1)


def _energies(slopes: Tensor, at: Tensor, points: int) -> Tensor:
    """Mean square of each point's slopes, summed over the outputs."""
    count = torch.zeros(points).index_add_(0, at, torch.ones(len(at)))
    sums = torch.zeros(points).index_add_(0, at, slopes.square().sum(1))
    return (sums / count).clamp(min=1e-12)


def _read(kept: Mapping[str, Any]) -> Visit:
    return Visit(tuple(kept["key"]), list(kept["ids"]), list(kept["draws"]), kept["slopes"])


def _factors(kept: Mapping[str, Any] | None, size: int, seed: int) -> Factors:
    if kept is None:
        return Factors.unknown(size, seed)
    return Factors(kept["directions"], float(kept["floor"]), float(kept["drift"]))
