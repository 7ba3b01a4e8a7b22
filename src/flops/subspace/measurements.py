"""Shaped queries: which directions each point asks, and the slopes that come back.

Of a point's draws the first are isotropic; the others ask the most energetic known directions, one
each, so that the slope is the coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.engine.meetings import Work
from flops.engine.queries import Queries
from flops.engine.rows import Rows, plan
from flops.perturb.random import Kind, NoiseStream, generator
from flops.subspace.basis import Directions
from flops.subspace.moments import Grid

FITTED = 512  # isotropic draws of a point that are fitted, at most: a fit costs their cube
BLOCK = 4_000_000  # noise values, or entries of kernels, in one block of points


@dataclass(frozen=True)
class Space:
    """Where the noise goes.

    Attributes:
        grids: Its parts.
        unit: Queries per draw.
        noise: Kind of the isotropic noise.
        dtype: Of slopes and deltas.
        ask: Slopes of the draws of some rows, given their noise, shape (draws, dimensions).
        sigma: Noise scale.
        names: What the parts are called in reports.
        mask: 0 where the noise of a point cannot matter, shape (B, dimensions).
        recorded: Whether directions are decided once and kept: eigenvectors of another machine may
            have other signs than those that were asked.
    """

    grids: Sequence[Grid]
    unit: int
    noise: Kind
    dtype: torch.dtype
    ask: Callable[[Rows, Tensor], Work[Tensor]]
    sigma: float
    names: Sequence[str]
    mask: Tensor | None = None
    recorded: bool = False

    @property
    def dimensions(self) -> int:
        """Noise values of a row."""
        return self.grids[-1].offset + self.grids[-1].size


class Isotropic:
    """Isotropic noise of all points, kept if it is small, else made anew when it is wanted."""

    def __init__(self, space: Space, queries: Queries, iso: Tensor) -> None:
        self._dtype, size = space.dtype, space.dimensions
        self._stream = NoiseStream(space.noise, queries.key, queries.ids, iso.tolist(), size)
        self._start = iso.cumsum(0) - iso
        small = int(iso.sum()) * size <= BLOCK
        self._kept = torch.zeros(int(iso.sum()) if small else 0, size, dtype=self._dtype)
        self._have = torch.zeros(len(self._kept), dtype=torch.bool)

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws; a point's must be consecutive."""
        at = self._start[points] + draws
        if len(self._kept) and bool(self._have[at].all()):
            return self._kept[at]
        rows = self._stream.rows(points, draws).to(self._dtype)
        if len(self._kept):
            self._kept[at], self._have[at] = rows, True
        return rows


@dataclass(frozen=True)
class Asked:
    """The queries of a step and their answers.

    Attributes:
        noise: The isotropic draws.
        iso: How many each point has, shape (B,).
        draws: All draws of each point, shape (B,).
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Which directions were asked, shape (B, m).
        w: Slope of each draw, shape (B, most draws).
        c: Measured coordinates, shape (B, m).
    """

    space: Space
    queries: Queries
    known: Directions
    noise: Isotropic
    iso: Tensor
    draws: Tensor
    prior: Tensor
    measured: Tensor
    w: Tensor
    c: Tensor

    @property
    def fitted(self) -> Tensor:
        """Isotropic draws that are looked at, shape (B,)."""
        return self.iso.clamp(max=FITTED)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Points with like numbers n of isotropic draws.

        Yields points, which draws are real, shape (b, n), and their noise, shape
        (b, n, dimensions), zero in the padding.
        """
        count = self.fitted
        order = count.argsort(stable=True)
        order = order[count[order] > 0]
        for points in _cut(order, count, self.space.dimensions):
            real = torch.arange(int(count[points].max())) < count[points].unsqueeze(1)
            place, draw = torch.nonzero(real).unbind(1)
            noise = torch.zeros(*real.shape, self.space.dimensions, dtype=self.space.dtype)
            noise[real] = self.noise.rows(points[place], draw)
            yield points, real, noise

    def unfitted(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Points, numbers and noise of the isotropic draws beyond those, shape (rows,)."""
        real = torch.arange(int(self.iso.max())) < self.iso.unsqueeze(1)
        points, draws = torch.nonzero(real[:, FITTED:]).unbind(1)
        size = max(1, BLOCK // self.space.dimensions)
        for at, draw in zip(points.split(size), (draws + FITTED).split(size), strict=True):
            if len(at):
                yield at, draw, self.noise.rows(at, draw)


def ask(
    space: Space, queries: Queries, known: Directions, iso: Tensor, draws: Tensor
) -> Work[Asked]:
    """Make all queries: slopes of isotropic noise, coordinates of known directions."""
    size, shaped = queries.size, draws - iso
    prior, order = _order(space, queries, known, int(shaped.max()))
    inside = torch.arange(order.size(1)) < shaped.unsqueeze(1)
    measured = torch.zeros(size, known.size, dtype=torch.bool)
    measured[torch.nonzero(inside)[:, 0], order[inside]] = True
    w = torch.zeros(size, max(1, int(draws.max())), dtype=space.dtype)
    c = torch.zeros(size, known.size, dtype=space.dtype)
    # As long as a Gaussian vector over the k directions: above rounding, below curvature.
    length = max(1.0, float(shaped.double().mean())) ** 0.5
    noise = Isotropic(space, queries, iso)
    found = []
    for rows in queries.chunks(space.unit):
        at, draw = rows.points[:: space.unit], rows.draws[:: space.unit]
        first = draw < iso[at]
        z = torch.empty(len(at), space.dimensions, dtype=space.dtype)
        if bool(first.any()):
            z[first] = noise.rows(at[first], draw[first])
        number = order[at[~first], (draw - iso[at])[~first]]
        if len(number):
            z[~first] = known.rows(number, length).to(z)
        slopes = yield from space.ask(rows, z)
        slopes[~first] /= length
        found.append(slopes)
    yield
    slopes, at = queries.everyone(found, space.unit, space.dtype)
    draw = plan(draws, 1).draws
    w[at, draw] = slopes
    known_ones = draw >= iso[at]
    number = order[at[known_ones], (draw - iso[at])[known_ones]]
    c[at[known_ones], number] = slopes[known_ones]
    return Asked(space, queries, known, noise, iso, draws, prior, measured, w, c)


def needed(space: Space, shaped: Tensor) -> int:
    """Leading directions so that every point finds as many as it asks that are not padding."""
    most = int(shaped.max())
    if space.mask is None:
        return most
    parts = [g.cut(space.mask)[:, :, 0].sum(1).clamp(min=1) / g.positions for g in space.grids]
    return math.ceil(most / min(float(part.min()) for part in parts)) + max(
        g.positions for g in space.grids
    )


def real_directions(space: Space, known: Directions, size: int) -> Tensor:
    """Which directions are not on a point's padding, shape (B, m) or (1, m)."""
    if space.mask is None:
        return torch.ones(1, known.size, dtype=torch.bool)
    real = torch.ones(size, known.size, dtype=torch.bool)
    for s, g in enumerate(space.grids):
        if not g.aligned:
            mine = torch.nonzero(known.site == s).flatten()
            real[:, mine] = g.cut(space.mask)[:, :, 0].bool()[:, known.row[mine]]
    return real


def _order(space: Space, queries: Queries, known: Directions, most: int) -> tuple[Tensor, Tensor]:
    """Expected energies by point, (B, m) or (1, m), and the directions in each one's order."""
    size = queries.size
    if space.mask is None:
        return known.energy.unsqueeze(0), torch.arange(most).expand(size, most)
    real = real_directions(space, known, size)
    energy = torch.where(real, known.energy, 0.0)
    for s, g in enumerate(space.grids):
        if not g.aligned:  # what is real shares what was expected of all positions
            mine = torch.nonzero(known.site == s).flatten()
            valid = g.cut(space.mask)[:, :, 0].sum(1, keepdim=True).clamp(min=1)
            energy[:, mine] *= g.positions / valid
    # Positions are alike beforehand: which of them are asked is left to chance; padding comes last.
    chance = torch.stack(
        [torch.rand(known.size, generator=generator(*queries.key, 2, i)) for i in queries.ids]
    )
    wish = torch.where(real, energy * (1 + 1e-3 * chance), -1.0)
    return energy, wish.argsort(dim=1, descending=True, stable=True)[:, :most]


def _cut(order: Tensor, iso: Tensor, dimensions: int) -> Iterator[Tensor]:
    """Runs of points, sorted by draws, whose noise and kernels fit into a block."""
    start, counts = 0, iso[order].tolist()
    for end, count in enumerate(counts):
        size = (end + 1 - start) * count * max(dimensions, count)
        uneven = count > 2 * counts[start] and size > BLOCK // 16  # mostly padding
        if end > start and (uneven or size > BLOCK):
            yield order[start:end]
            start = end
    if counts:
        yield order[start:]
