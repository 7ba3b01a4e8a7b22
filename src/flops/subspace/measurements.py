"""Shaped queries: which directions each point measures, and the derivatives along them.

Of a point's draws the first are isotropic; the others measure the directions of the basis that are
expected to hold most energy, one each, so that the directional derivative is the coordinate.

Which point makes which draw is decided on the CPU; noise, basis and derivatives are on the device
of what is perturbed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.perturb.random import CPU, Kind, NoiseStream
from flops.subspace.basis import Basis
from flops.subspace.moments import Grid

FITTED = 512  # isotropic draws of a point that are fitted, at most: a fit costs their cube
BLOCK = 4_000_000  # noise values, or entries of kernels, in one block of points


@dataclass(frozen=True)
class Space:
    """Where the noise of a step goes.

    Attributes:
        grids: Its parts.
        unit: Queries per draw.
        noise: Kind of the isotropic noise.
        dtype: Of derivatives and deltas.
        sigma: Noise scale.
        names: What the parts are called in reports.
        key: Of the noise: (seed, step, group).
        ids: Identity of each point for its noise.
        mask: 0 where the noise of a point cannot matter, shape (B, dimensions).
        device: Where noise, derivatives and deltas are.
    """

    grids: Sequence[Grid]
    unit: int
    noise: Kind
    dtype: torch.dtype
    sigma: float
    names: Sequence[str]
    key: tuple[int, ...]
    ids: list[int]
    mask: Tensor | None = None
    device: torch.device = CPU

    @property
    def dimensions(self) -> int:
        """Noise values of a row."""
        return self.grids[-1].offset + self.grids[-1].size

    @property
    def size(self) -> int:
        """Number of points."""
        return len(self.ids)


class Isotropic:
    """Isotropic noise of all points, kept if it is small, else made anew when it is wanted.

    Args:
        space: Where the noise goes.
        iso: Draws of each point, shape (B,), on the CPU.
    """

    def __init__(self, space: Space, iso: Tensor) -> None:
        self._dtype, size = space.dtype, space.dimensions
        self._stream = NoiseStream(
            space.noise, space.key, space.ids, iso.tolist(), size, space.device
        )
        self._start = iso.cumsum(0) - iso
        small = int(iso.sum()) * size <= BLOCK
        kept = int(iso.sum()) if small else 0
        self._kept = torch.zeros(kept, size, dtype=self._dtype, device=space.device)
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


class Design:
    """The measurements of a step before they are made.

    Args:
        space: Where the noise goes.
        known: The basis.
        iso: Isotropic draws of each point, shape (B,).
        draws: All draws of each point, shape (B,).

    Attributes:
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Which directions each point measures, shape (B, m).
    """

    def __init__(self, space: Space, known: Basis, iso: Tensor, draws: Tensor) -> None:
        self.space, self.known, self.iso, self.draws = space, known, iso, draws
        shaped = draws - iso
        self.prior, self._order = _order(space, known, int(shaped.max()))
        inside = torch.arange(self._order.size(1)) < shaped.unsqueeze(1)
        shape = (space.size, known.size)
        self.measured = torch.zeros(shape, dtype=torch.bool, device=space.device)
        self.measured[torch.nonzero(inside)[:, 0], self._order[inside]] = True
        # As long as a Gaussian vector over the k directions: above rounding, below curvature.
        self._length = max(1.0, float(shaped.double().mean())) ** 0.5
        self.noise = Isotropic(space, iso)

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws, shape (draws, dimensions); a point's must be consecutive."""
        first = draws < self.iso[points]
        shape = (len(points), self.space.dimensions)
        z = torch.empty(shape, dtype=self.space.dtype, device=self.space.device)
        if bool(first.any()):
            z[first] = self.noise.rows(points[first], draws[first])
        number = self._number(points[~first], draws[~first])
        if len(number):
            z[~first] = self.known.rows(number, self._length).to(z)
        return z

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor:
        """Derivatives along unit noise and unit directions, given those along `rows`."""
        return torch.where(draws < self.iso[points], derivatives, derivatives / self._length)

    def measurements(self, points: Tensor, derivatives: Tensor) -> Measurements:
        """All derivatives of the step, in the order of points and draws."""
        size, space = self.space.size, self.space
        most = max(1, int(self.draws.max()))
        w = torch.zeros(size, most, dtype=space.dtype, device=space.device)
        c, derivatives = w.new_zeros(size, self.known.size), derivatives.to(space.device)
        firsts = torch.cumsum(self.draws, 0) - self.draws
        draw = torch.arange(len(points)) - firsts[points]
        w[points, draw] = derivatives
        shaped = draw >= self.iso[points]
        number = self._number(points[shaped], draw[shaped])
        c[points[shaped], number] = derivatives[shaped]
        return Measurements(
            space, self.known, self.noise, self.iso, self.draws, self.prior, self.measured, w, c
        )

    def _number(self, points: Tensor, draws: Tensor) -> Tensor:
        return self._order[points, draws - self.iso[points]]


@dataclass(frozen=True)
class Measurements:
    """The queries of a step and what they showed.

    Attributes:
        space: Where the noise went.
        known: The basis.
        noise: The isotropic draws.
        iso: How many each point has, shape (B,).
        draws: All draws of each point, shape (B,).
        prior: Expected energy share of each direction, shape (B, m) or (1, m).
        measured: Which directions were measured, shape (B, m).
        w: Directional derivative of each draw, shape (B, most draws).
        c: Measured coordinates, shape (B, m).
    """

    space: Space
    known: Basis
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
            noise = self.w.new_zeros(*real.shape, self.space.dimensions)
            noise[real] = self.noise.rows(points[place], draw)
            yield points, real.to(noise.device), noise

    def unfitted(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Points, numbers and noise of the isotropic draws beyond those, shape (rows,)."""
        real = torch.arange(int(self.iso.max())) < self.iso.unsqueeze(1)
        points, draws = torch.nonzero(real[:, FITTED:]).unbind(1)
        size = max(1, BLOCK // self.space.dimensions)
        for at, draw in zip(points.split(size), (draws + FITTED).split(size), strict=True):
            if len(at):
                yield at, draw, self.noise.rows(at, draw)


def needed(space: Space, shaped: Tensor) -> int:
    """Leading directions so that every point finds as many as it measures that are not padding."""
    most = int(shaped.max())
    if space.mask is None:
        return most
    parts = [g.cut(space.mask)[:, :, 0].sum(1).clamp(min=1) / g.positions for g in space.grids]
    return math.ceil(most / min(float(part.min()) for part in parts)) + max(
        g.positions for g in space.grids
    )


def real_directions(space: Space, known: Basis) -> Tensor:
    """Which directions are not on a point's padding, shape (B, m) or (1, m)."""
    if space.mask is None:
        return torch.ones(1, known.size, dtype=torch.bool, device=space.device)
    real = torch.ones(space.size, known.size, dtype=torch.bool, device=space.device)
    for s, g in enumerate(space.grids):
        if not g.aligned:
            mine = torch.nonzero(known.site == s).flatten()
            real[:, mine] = g.cut(space.mask)[:, :, 0].bool()[:, known.row[mine]]
    return real


def _order(space: Space, known: Basis, most: int) -> tuple[Tensor, Tensor]:
    """Expected energies by point, (B, m) or (1, m), and the directions in each one's order."""
    size = space.size
    if space.mask is None:
        return known.energy.unsqueeze(0), torch.arange(most).expand(size, most)
    real = real_directions(space, known)
    energy = torch.where(real, known.energy, 0.0)
    for s, g in enumerate(space.grids):
        if not g.aligned:  # what is real shares what was expected of all positions
            mine = torch.nonzero(known.site == s).flatten()
            valid = g.cut(space.mask)[:, :, 0].sum(1, keepdim=True).clamp(min=1)
            energy[:, mine] *= g.positions / valid
    # Positions are alike beforehand: which of them are measured is left to chance; padding comes
    # last.
    ones, points = [1] * size, torch.arange(size)
    stream = NoiseStream("gaussian", (*space.key, 2), space.ids, ones, known.size, space.device)
    chance = torch.special.ndtr(stream.rows(points, torch.zeros_like(points)))
    wish = torch.where(real, energy * (1 + 1e-3 * chance), -1.0)
    return energy, wish.argsort(dim=1, descending=True, stable=True)[:, :most].cpu()


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
