"""Shaped queries: which directions each point asks, and the slopes that come back.

Of a point's draws the first are isotropic; the others ask the most energetic known directions, one
each, so that the slope is the coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.directions import Directions
from flops.moments import Grid
from flops.noise import Kind, NoiseStream, generator
from flops.plan import Rows
from flops.queries import Queries

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
    """

    grids: Sequence[Grid]
    unit: int
    noise: Kind
    dtype: torch.dtype
    ask: Callable[[Rows, Tensor], Tensor]
    sigma: float
    names: Sequence[str]
    mask: Tensor | None = None

    @property
    def dimensions(self) -> int:
        """Noise values of a row."""
        return self.grids[-1].offset + self.grids[-1].size


@dataclass(frozen=True)
class Asked:
    """The queries of a step and their answers.

    Attributes:
        iso: Isotropic draws of each point, shape (B,).
        draws: All draws of each point, shape (B,).
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Which directions were asked, shape (B, m).
        w: Slope of each draw, shape (B, most draws).
        c: Measured coordinates, shape (B, m).
    """

    space: Space
    queries: Queries
    known: Directions
    iso: Tensor
    draws: Tensor
    prior: Tensor
    measured: Tensor
    w: Tensor
    c: Tensor

    def blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Points with like numbers of isotropic draws, whose noise is made anew.

        Yields points, and for every isotropic draw its point's place in the block, its number
        and its noise.
        """
        order = self.iso.argsort(stable=True)
        order = order[self.iso[order] > 0]
        stream = _isotropic(self.space, self.queries, self.iso)
        for points in _cut(order, self.iso, self.space.dimensions):
            place = torch.repeat_interleave(torch.arange(len(points)), self.iso[points])
            firsts = self.iso[points].cumsum(0) - self.iso[points]
            draw = torch.arange(len(place)) - firsts[place]
            z = stream.rows(points[place], draw).to(self.space.dtype)
            yield points, place, draw, z


def ask(space: Space, queries: Queries, known: Directions, iso: Tensor, draws: Tensor) -> Asked:
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
    stream = _isotropic(space, queries, iso)
    for rows in queries.chunks(space.unit):
        at, draw = rows.points[:: space.unit], rows.draws[:: space.unit]
        first = draw < iso[at]
        z = torch.empty(len(at), space.dimensions, dtype=space.dtype)
        if bool(first.any()):
            z[first] = stream.rows(at[first], draw[first]).to(z)
        number = order[at[~first], (draw - iso[at])[~first]]
        if len(number):
            z[~first] = length * known.rows(number).to(z)
        slopes = space.ask(rows, z)
        slopes[~first] /= length
        c[at[~first], number] = slopes[~first]
        w[at, draw] = slopes
    return Asked(space, queries, known, iso, draws, prior, measured, w, c)


def _order(space: Space, queries: Queries, known: Directions, most: int) -> tuple[Tensor, Tensor]:
    """Expected energies by point, (B, m) or (1, m), and the directions in each one's order."""
    size = queries.size
    if all(g.aligned for g in space.grids):
        return known.energy.unsqueeze(0), torch.arange(most).expand(size, most)
    real = torch.ones(size, known.size, dtype=known.energy.dtype)
    if space.mask is not None:
        for s, g in enumerate(space.grids):
            mine = torch.nonzero(known.site == s).flatten()
            if not g.aligned:  # one factor over positions: all that is real has the same share
                valid = g.cut(space.mask)[:, :, 0].to(real)
                share = valid * (g.positions / valid.sum(1, keepdim=True).clamp(min=1))
                real[:, mine] = share[:, known.row[mine]]
    # Positions are alike beforehand: which of them are asked is left to chance; padding comes last.
    chance = torch.stack(
        [torch.rand(known.size, generator=generator(*queries.key, 2, i)) for i in queries.ids]
    )
    energy = real * known.energy
    wish = torch.where(real > 0, energy * (1 + 1e-3 * chance), -1.0)
    return energy, wish.argsort(dim=1, descending=True, stable=True)[:, :most]


def _isotropic(space: Space, queries: Queries, iso: Tensor) -> NoiseStream:
    return NoiseStream(space.noise, queries.key, queries.ids, iso.tolist(), space.dimensions)


def _cut(order: Tensor, iso: Tensor, dimensions: int) -> Iterator[Tensor]:
    """Runs of points whose noise and kernels fit into a block."""
    start, rows = 0, 0
    for end, count in enumerate(iso[order].tolist()):
        kernels = (end + 1 - start) * count**2  # sorted: the last one is the widest
        if end > start and max((rows + count) * dimensions, kernels) > BLOCK:
            yield order[start:end]
            start, rows = end, 0
        rows += count
    if start < len(order):
        yield order[start:]
