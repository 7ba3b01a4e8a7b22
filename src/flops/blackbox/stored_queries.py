"""Stored queries: derivatives of the outputs along the noise of earlier steps.

A journal and a state hold the derivatives; their noise is regenerated from its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flops.blackbox.jacobian_factors import Measured
from flops.perturb.random import NoiseStream
from flops.subspace.basis import Space

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

    @classmethod
    def from_memory(cls, kept: Mapping[str, Any]) -> QueryBatch:
        """Restore from `vars`."""
        key, ids, draws = tuple(kept["key"]), list(kept["ids"]), list(kept["draws"])
        return cls(key, ids, draws, kept["derivatives"])

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
class StoredQueries:
    """Which queries of earlier steps are kept, and their noise.

    Args:
        newest: Stored derivatives per point, unless one step has more.
        room: Noise values kept.
    """

    newest: int
    room: int
    _noise: dict[Name, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def noise(self, name: Name, space: Space) -> Tensor:
        """Noise of a batch's draws, regenerated after a restart, shape (total draws, d)."""
        if name not in self._noise:
            key, ids, draws = name[0], list(name[1]), list(name[2])
            place = torch.repeat_interleave(torch.arange(len(draws)), torch.tensor(draws))
            number = torch.cat([torch.arange(d) for d in draws])
            stream = NoiseStream(space.noise, key, ids, draws, space.dimensions)
            self._noise[name] = stream.rows(place, number).clone()
        return self._noise[name]

    def kept(self, batches: Sequence[QueryBatch], size: int) -> list[KeptDraws]:
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
            if kept and rows * size > self.room:
                break
            if len(use):
                kept.append(KeptDraws(batch, use, batch.points()[use], number[use]))
        names = {part.batch.name for part in kept}
        for name in [n for n in self._noise if n not in names]:
            del self._noise[name]
        return kept

    def measured(
        self, kept: Sequence[KeptDraws], space: Space
    ) -> tuple[Measured, Tensor, dict[int, int]]:
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
        noise, derivatives = torch.zeros(*shape, space.dimensions), torch.zeros(*shape, outputs)
        age, real = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for part in kept:
            within = part.points < len(place)
            at = place[part.points.clamp(max=len(place) - 1)]
            mine = torch.nonzero(within & (at >= 0)).flatten()
            at, number, use = at[mine], part.number[mine], part.use[mine]
            noise[at, number] = self.noise(part.batch.name, space)[use]
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


def _energies(derivatives: Tensor, age: Tensor, real: Tensor) -> Tensor:
    """Mean square of each point's newest derivatives, summed over the outputs.

    Bounded from below by a fraction of the mean over all its derivatives, which it also scales.
    """
    newest = torch.where(real, age, torch.inf).amin(1, keepdim=True)
    squares = derivatives.square().sum(2)

    def mean(of: Tensor) -> Tensor:
        return torch.where(of, squares, 0.0).sum(1) / of.sum(1)

    return torch.maximum(mean(real & (age == newest)), 0.01 * mean(real)).clamp(min=1e-30)
