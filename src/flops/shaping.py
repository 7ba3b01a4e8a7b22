"""Shaped noise: what earlier queries showed about where the gradient of a site lives.

Per site two second-moment matrices of the activation gradient are kept, over positions (tokens,
pixels) and over channels; a flat site has the channels only. Products of their eigenvectors are
directions, products of eigenvalues their energies, and the k most energetic directions of all
sites of a group together are the subspace in which most queries ask.

k maximises captured(k) * A / (A + k / 2) for A shaped queries per point: a direction more catches
more of the gradient, but spreads the same queries over more unknowns. (The energy that ridge
regression recovers in theory, the obvious alternative, gives a smaller k and did worse: directions
just below the line must be asked now and then to stay known.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flops.sites import Site


@dataclass(frozen=True)
class Shaping:
    """Options of shaped noise; None is adapted from the data.

    Args:
        explore: Share of isotropic queries, which see what the subspace misses.
        decay: What the second moments keep from step to step.
        unbiased: Add the isotropic queries' leave-one-out residuals, so that the mean is that of
            isotropic noise whatever the subspace; noisier.
    """

    explore: float | None = None
    decay: float | None = None
    unbiased: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.explore is not None and not 0 < self.explore <= 1:
            raise ValueError(f"explore must lie in (0, 1], not {self.explore}")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), not {self.decay}")


@dataclass(frozen=True)
class Grid:
    """A site as a matrix of positions and channels."""

    offset: int
    positions: int
    channels: int
    channels_first: bool

    @property
    def size(self) -> int:
        """Noise values of the site."""
        return self.positions * self.channels

    def cut(self, rows: Tensor) -> Tensor:
        """The site's part of rows of all sites, shape (n, positions, channels)."""
        part = rows[:, self.offset : self.offset + self.size]
        if self.channels_first:
            return part.reshape(-1, self.channels, self.positions).transpose(1, 2)
        return part.reshape(-1, self.positions, self.channels)

    def paste(self, rows: Tensor, part: Tensor) -> None:
        """Write the site's part into rows of all sites."""
        flat = part.transpose(1, 2) if self.channels_first else part
        rows[:, self.offset : self.offset + self.size] = flat.reshape(len(rows), -1)


def grid(site: Site) -> Grid:
    """Tokens x channels for (T, D), positions x channels for (C, H, W), channels for (D,)."""
    shape = site.row_shape
    if len(shape) >= 3:  # convolutional: channels first
        return Grid(site.offset, site.size // shape[0], shape[0], channels_first=True)
    if len(shape) == 2:
        return Grid(site.offset, shape[0], shape[1], channels_first=False)
    return Grid(site.offset, 1, site.size, channels_first=False)


@dataclass(frozen=True)
class Subspace:
    """The k directions in which shaped queries ask, over all sites of a group.

    Attributes:
        grids: The sites.
        positions: Eigenvectors over positions, by site.
        channels: Eigenvectors over channels, by site.
        chosen: By site, flat indices (position * channels + channel) of its directions.
        prior: Energy of each direction as a share of all, shape (k,).
    """

    grids: tuple[Grid, ...]
    positions: tuple[Tensor, ...]
    channels: tuple[Tensor, ...]
    chosen: tuple[Tensor, ...]
    prior: Tensor

    @property
    def size(self) -> int:
        """Number of directions k."""
        return len(self.prior)

    def lift(self, c: Tensor) -> Tensor:
        """From coordinates (n, k) to rows of all sites (n, size)."""
        rows = torch.zeros(len(c), self.grids[-1].offset + self.grids[-1].size, dtype=c.dtype)
        start = 0
        for g, u, v, index in zip(
            self.grids, self.positions, self.channels, self.chosen, strict=True
        ):
            if len(index):
                full = torch.zeros(len(c), g.size, dtype=c.dtype)
                full[:, index] = c[:, start : start + len(index)]
                g.paste(rows, u @ full.view(-1, g.positions, g.channels) @ v.T)
            start += len(index)
        return rows

    def coordinates(self, rows: Tensor) -> Tensor:
        """From rows of all sites (n, size) to coordinates (n, k)."""
        parts = []
        for g, u, v, index in zip(
            self.grids, self.positions, self.channels, self.chosen, strict=True
        ):
            if len(index):
                parts.append((u.T @ g.cut(rows) @ v).flatten(1)[:, index])
        return torch.cat(parts, 1)

    def outside(self, site: int) -> Tensor:
        """1 for the directions of a site that were not chosen, (positions, channels)."""
        g = self.grids[site]
        mask = torch.ones(g.size, dtype=self.prior.dtype)
        mask[self.chosen[site]] = 0
        return mask.view(g.positions, g.channels)


@dataclass(frozen=True)
class Moments:
    """Second moments of a site's gradient, for points of unit energy."""

    positions: Tensor
    channels: Tensor


def empty_moments(grids: Sequence[Grid], dtype: torch.dtype) -> list[Moments]:
    """Nothing is known."""
    return [
        Moments(
            torch.zeros(g.positions, g.positions, dtype=dtype),
            torch.zeros(g.channels, g.channels, dtype=dtype),
        )
        for g in grids
    ]


def choose(grids: Sequence[Grid], moments: Sequence[Moments], asked: float) -> Subspace:
    """The best subspace for this many shaped queries per point."""
    bases = []
    energies = []
    for m in moments:
        ep, up = torch.linalg.eigh(m.positions)
        ec, uc = torch.linalg.eigh(m.channels)
        ep, ec = ep.clamp(min=0), ec.clamp(min=0)
        total = ep.sum().clamp(min=1e-30)
        energy = (ep / total)[:, None] * (ec / ec.sum().clamp(min=1e-30)) * total
        bases.append((up, uc))
        energies.append(energy.flatten())
    every = torch.cat(energies)
    share, order = (every / every.sum().clamp(min=1e-30)).sort(descending=True)
    k = torch.arange(1, len(share) + 1, dtype=share.dtype)
    value = share.cumsum(0) * asked / (asked + k / 2)
    # A third as many directions as queries cost nothing: the fit is exact in them anyway.
    free = min(int(asked / 3), int((share > 1e-9).sum()))
    size = min(max(int(value.argmax()) + 1, free), max(1, int((share > 0).sum())))
    kept = order[:size].sort().values  # by site, then by place
    chosen, start = [], 0
    for energy in energies:
        inside = (kept >= start) & (kept < start + len(energy))
        chosen.append(kept[inside] - start)
        start += len(energy)
    prior = (every / every.sum().clamp(min=1e-30))[kept]
    return Subspace(
        tuple(grids),
        tuple(up for up, _ in bases),
        tuple(uc for _, uc in bases),
        tuple(chosen),
        prior.clamp(min=1e-12),
    )


def learn(
    moments: Sequence[Moments],
    grids: Sequence[Grid],
    subspace: Subspace | None,
    delta: Tensor,
    energy: Tensor,
    floor: float,
    covariance: Tensor | None,
    decay: float,
) -> list[Moments]:
    """Add a step's estimates to the moments, minus their noise, plus what the posterior shrank.

    Args:
        moments: So far.
        grids: The sites.
        subspace: In which the step asked; None if it was all isotropic.
        delta: Each point's estimate, inside and outside the subspace, (B, size).
        energy: Energy of each point, (B,).
        floor: Sum over points of the variance per direction of the isotropic part, at unit energy.
        covariance: Posterior variance of the subspace's coordinates, summed over points, (k,).
        decay: What the old moments keep.
    """
    unit = delta / energy.clamp(min=1e-30).sqrt().unsqueeze(1)
    learned, start = [], 0
    for site, (old, g) in enumerate(zip(moments, grids, strict=True)):
        d = g.cut(unit)  # (B, P, C)
        positions = torch.einsum("npc,nqc->pq", d, d)
        channels = torch.einsum("npc,npe->ce", d, d)
        if subspace is None:
            positions -= floor * g.channels * torch.eye(g.positions, dtype=d.dtype)
            channels -= floor * g.positions * torch.eye(g.channels, dtype=d.dtype)
        else:
            u, v, index = subspace.positions[site], subspace.channels[site], subspace.chosen[site]
            out = -floor * subspace.outside(site)
            if covariance is not None and len(index):
                flat = out.flatten()
                flat[index] += covariance[start : start + len(index)]
                out = flat.view(g.positions, g.channels)
            start += len(index)
            positions += (u * out.sum(1)) @ u.T
            channels += (v * out.sum(0)) @ v.T
        learned.append(Moments(decay * old.positions + positions, decay * old.channels + channels))
    return learned


def to_memory(moments: Sequence[Moments]) -> list[Any]:
    """Plain tensors, for the state."""
    return [(m.positions, m.channels) for m in moments]


def from_memory(kept: Sequence[Any]) -> list[Moments]:
    """Back from the state."""
    return [Moments(*pair) for pair in kept]
