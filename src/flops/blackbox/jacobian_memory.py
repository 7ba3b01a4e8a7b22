"""Shaped noise for a black box that shows its outputs: what was asked before is remembered.

The gradient of a point's loss is J^T r, with J the Jacobian of its outputs and r the derivative of
the loss by these. r changes with every step and is known; J hardly changes from one visit of a
point to the next. So the slopes of earlier visits still tell about it, and so do those of other
points, through directions that all of them share (`flops.blackbox.jacobian_factors`). Queries are
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

from flops.blackbox.jacobian_factors import Factors, Fit, Measured
from flops.engine.queries import Queries, Shaped
from flops.engine.report import ShapingReport
from flops.errors import FlopsError
from flops.perturb.random import Kind, NoiseStream

NEWEST = 96  # slopes of a point that are remembered, unless one step has more
MOST = 512  # slopes of a point that are looked at: a fit costs their cube
POINTS = 256  # points that are looked at, unless a batch has more: this step's and the latest
ROOM = 1 << 27  # noise values that are remembered, 512 MB

Name = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


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

    @property
    def name(self) -> Name:
        """All that its noise depends on."""
        return self.key, tuple(self.ids), tuple(self.draws)

    def points(self) -> Tensor:
        """Point of each draw."""
        return torch.repeat_interleave(torch.tensor(self.ids), torch.tensor(self.draws))


@dataclass(frozen=True)
class Part:
    """Draws of a visit that are remembered.

    Attributes:
        visit: The visit.
        use: Which of its draws.
        points: Their points.
        number: Place of each among its point's draws, the newest first.
    """

    visit: Visit
    use: Tensor
    points: Tensor
    number: Tensor


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
    _noise: dict[Name, Tensor] = field(default_factory=dict, compare=False)

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
        if any(v.slopes.size(1) != slopes.size(1) for v in visits):
            raise FlopsError("the objective has another number of outputs than it had before")
        kept = self._kept(visits)
        if not kept:
            raise FlopsError("a step without queries")
        seen, energies, place = self._measured(kept)
        now = torch.tensor([place[i] for i in queries.ids if i in place])
        before = _factors(memory.get("factors"), self.size, queries.key[0])
        after = before.learned(seen, now) if len(now) and float(slopes.abs().max()) > 0 else before
        memory["visits"] = [vars(part.visit) for part in kept]
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
        whole = float(((slopes * r.repeat_interleave(draws, 0)).sum(1)).square().sum())
        left = float((missed * draws).sum()) / whole if whole > 0 else 0.0
        report = ShapingReport(0.0, max(0.0, 1 - left), 1.0, 1.0, ())
        error = missed * self.size / draws.clamp(min=1)
        return Recalled(delta, Shaped(missed, error, self.size, report))

    def _kept(self, visits: Sequence[Visit]) -> list[Part]:
        """Newest visits first: as many as there is room for, and of each what is not too old."""
        rows, longest = 0, min(MOST, max(NEWEST, *visits[0].draws))
        count: dict[int, int] = {}
        kept: list[Part] = []
        for visit in visits:
            numbers = []
            for i, draws in zip(visit.ids, visit.draws, strict=True):
                numbers.append(torch.arange(draws) + count.get(i, 0))
                count[i] = count.get(i, 0) + draws
            number = torch.cat(numbers)
            use = torch.nonzero(number < longest).flatten()
            rows += len(use)
            if kept and rows * self.size > ROOM:
                break
            if len(use):
                kept.append(Part(visit, use, visit.points()[use], number[use]))
        names = {part.visit.name for part in kept}
        for name in [n for n in self._noise if n not in names]:
            del self._noise[name]
        return kept

    def _measured(self, kept: Sequence[Part]) -> tuple[Measured, Tensor, dict[int, int]]:
        """What is remembered of this step's points and the latest others, energies, places."""
        chosen: dict[int, int] = {}
        for part in kept:
            for i in part.visit.ids:
                if i not in chosen and (part is kept[0] or len(chosen) < POINTS):
                    chosen[i] = len(chosen)
        place = torch.full((max(chosen) + 1,), -1)
        place[list(chosen)] = torch.arange(len(chosen))
        step, outputs = kept[0].visit.key[1], kept[0].visit.slopes.size(1)
        longest = 1 + max(int(part.number.max()) for part in kept)
        shape = (len(chosen), longest)
        noise, slopes = torch.zeros(*shape, self.size), torch.zeros(*shape, outputs)
        age, real = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for part in kept:
            within = part.points < len(place)
            at = place[part.points.clamp(max=len(place) - 1)]
            mine = torch.nonzero(within & (at >= 0)).flatten()
            at, number, use = at[mine], part.number[mine], part.use[mine]
            noise[at, number] = self._noise_of(part.visit)[use]
            slopes[at, number] = part.visit.slopes[use]
            age[at, number] = float(step - part.visit.key[1])
            real[at, number] = True
        known = real.any(1)
        places = {i: int(n) for n, i in enumerate(torch.nonzero(known).flatten().tolist())}
        found = {i: places[n] for i, n in chosen.items() if n in places}
        noise, slopes, age, real = noise[known], slopes[known], age[known], real[known]
        energies = _energies(slopes, age, real)
        slopes /= energies.sqrt().view(-1, 1, 1)
        products = noise @ noise.transpose(1, 2)
        return Measured(noise, slopes, age, real, products), energies, found

    def _noise_of(self, visit: Visit) -> Tensor:
        """Noise of a visit's draws: kept, or made again behind a restart."""
        if visit.name not in self._noise:
            draws = torch.tensor(visit.draws)
            place = torch.repeat_interleave(torch.arange(len(draws)), draws)
            number = torch.cat([torch.arange(d) for d in visit.draws])
            stream = self.stream(visit.key, visit.ids, visit.draws)
            self._noise[visit.name] = stream.rows(place, number).clone()
        return self._noise[visit.name]


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


def _energies(slopes: Tensor, age: Tensor, real: Tensor) -> Tensor:
    """Mean square of each point's newest slopes, summed over the outputs.

    Not much less than that of all its slopes: older ones are measured by it too.
    """
    newest = torch.where(real, age, torch.inf).amin(1, keepdim=True)
    squares = slopes.square().sum(2)

    def mean(of: Tensor) -> Tensor:
        return torch.where(of, squares, 0.0).sum(1) / of.sum(1)

    return torch.maximum(mean(real & (age == newest)), 0.01 * mean(real)).clamp(min=1e-30)


def _read(kept: Mapping[str, Any]) -> Visit:
    return Visit(tuple(kept["key"]), list(kept["ids"]), list(kept["draws"]), kept["slopes"])


def _factors(kept: Mapping[str, Any] | None, size: int, seed: int) -> Factors:
    if kept is None:
        return Factors.unknown(size, seed)
    return Factors(kept["directions"], float(kept["floor"]), float(kept["drift"]))
