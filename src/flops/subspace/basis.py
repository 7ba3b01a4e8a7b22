"""Basis of the gradient's subspace: sites as grids, and directions u v^T of one site each.

Eigenvectors of the two second moments of a site (`flops.subspace.moments`) give directions u v^T,
products of the eigenvalues their energies. Directions of all sites of a group are sorted by energy;
a point with a shaped queries measures the first a, one per query. These are the optimal a linear
measurements of a gradient with this second moment; each derivative *is* a coordinate, without a
linear system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.passes.ranks import Replicas
from flops.passes.replay import Passes
from flops.perturb.activations import Site, Sites
from flops.perturb.random import CPU, Kind, NoiseStream

NARROW = 16  # channels up to which rows share a product


@dataclass(frozen=True)
class Grid:
    """A site as a matrix of positions and channels.

    Attributes:
        offset: Start of the site in a row of all sites.
        positions: Tokens or pixels; 1 for a flat site.
        channels: Channels.
        channels_first: Whether channels come before positions in memory.
        aligned: Whether positions correspond across points. If not (sequences of varying length),
            only the channels are learned.
    """

    offset: int
    positions: int
    channels: int
    channels_first: bool = False
    aligned: bool = True

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


def grid(site: Site, channels_first: bool) -> Grid:
    """Tokens x channels for (T, D), positions x channels for (C, H, W), channels for (D,).

    Args:
        site: The site.
        channels_first: Whether two axes are (C, L), as after a one-dimensional convolution.
    """
    shape = site.row_shape
    if len(shape) >= 3 or (len(shape) == 2 and channels_first):
        return Grid(site.offset, site.size // shape[0], shape[0], channels_first=True)
    if len(shape) == 2:
        return Grid(site.offset, shape[0], shape[1])
    return Grid(site.offset, 1, site.size)


def site_grids(
    sites: Sites, mask: str, passes: Passes, memory: dict[str, Any], replicas: Replicas
) -> tuple[list[Grid], Tensor | None]:
    """The sites of a group as grids, and a mask of the noise that has an effect, or None for all.

    Positions are not aligned if there is a padding mask, or if their number has changed between
    batches, or differs between replicas.

    Args:
        sites: The noise sites.
        mask: Name of the model's input that is 0 at padding.
        passes: Passes over the batch.
        memory: State of the group, in which the numbers of positions are kept.
        replicas: Ranks with other points.
    """
    found, size = passes.batch.named(mask), passes.batch.size
    lengths = memory.get("positions", ())
    if len(lengths) != len(sites.sites):
        lengths = [None] * len(sites.sites)
    grids, masks, hidden = [], [], []
    for site in sites.sites:
        module = passes.modules[sites.structure.calls[site.call].name]
        g = grid(site, isinstance(module, nn.Conv1d | nn.ConvTranspose1d))
        tokens = len(site.row_shape) == 2 and not g.channels_first
        hidden.append(tokens and found is not None and found.shape == (size, g.positions))
        grids.append(g)
    apart = _apart(grids, hidden, replicas)
    for s, (g, length, masked) in enumerate(zip(grids, lengths, hidden, strict=True)):
        if apart[s] or length not in (None, g.positions):
            g = grids[s] = replace(g, aligned=False)
        device = sites.sites[0].leaf.device
        real = torch.ones(size, g.positions, dtype=torch.bool, device=device)
        if masked and found is not None:
            real = found.to(device) != 0
        masks.append(real.unsqueeze(2).expand(-1, -1, g.channels).flatten(1))
    # 0 for a site whose positions are not aligned: it stays so.
    memory["positions"] = [g.positions if g.aligned else 0 for g in grids]
    return grids, None if all(g.aligned for g in grids) else torch.cat(masks, 1)


def _apart(grids: Sequence[Grid], masked: Sequence[bool], replicas: Replicas) -> list[bool]:
    """Whether the positions of a site are masked, or their number differs, on any replica."""
    count = torch.tensor([g.positions for g in grids], dtype=torch.float64)
    flags = torch.tensor(masked, dtype=torch.float64)
    most, least, hidden = replicas.max(torch.cat([count, -count, flags])).view(3, -1)
    return [bool(x) for x in (hidden > 0) | (most != -least)]


@dataclass(frozen=True)
class Space:
    """Space of the noise of a step.

    Attributes:
        grids: Its sites.
        unit: Queries per draw.
        noise: Kind of the isotropic noise.
        dtype: Type of derivatives and deltas.
        sigma: Noise scale.
        names: Names of the sites in reports.
        key: (seed, step, group), the key of the noise.
        ids: Identity of each point for its noise.
        mask: 0 where the noise of a point has no effect, shape (B, dimensions).
        device: Device of noise, derivatives and deltas.
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


def signed(vectors: Tensor) -> Tensor:
    """The columns, each with its largest entry positive (the first, if several are equal).

    The sign of an eigenvector depends on rounding, and queries along v and -v differ by the
    curvature: without this, results would differ between processes and threads.
    """
    sizes = vectors.abs()
    alike = sizes >= (1 - 1e-6) * sizes.amax(0)
    largest = vectors.gather(0, alike.int().argmax(0, keepdim=True))  # argmax: the first
    return torch.where(largest < 0, -vectors, vectors).contiguous()


@dataclass(frozen=True)
class Basis:
    """Leading directions over all sites of a group, most energetic first.

    Attributes:
        grids: The sites.
        positions: Eigenvectors over positions, by site.
        channels: Eigenvectors over channels, by site.
        site: Site of each direction, shape (m,).
        row: Its eigenvector over positions, shape (m,).
        column: Its eigenvector over channels, shape (m,).
        energy: Expected share of the gradient's energy, shape (m,).
        rest: The same for each other direction.
    """

    grids: tuple[Grid, ...]
    positions: tuple[Tensor, ...]
    channels: tuple[Tensor, ...]
    site: Tensor
    row: Tensor
    column: Tensor
    energy: Tensor
    rest: float

    @property
    def size(self) -> int:
        """Number of directions m."""
        return len(self.energy)

    @property
    def dimensions(self) -> int:
        """Noise values of a row of all sites."""
        return self.grids[-1].offset + self.grids[-1].size

    def rows(self, chosen: Tensor, length: float = 1.0) -> Tensor:
        """Directions, by number, as rows of all sites."""
        chosen = chosen.to(self.site.device)
        rows = self.energy.new_zeros(len(chosen), self.dimensions)
        for s, g in enumerate(self.grids):
            mine = torch.nonzero(self.site[chosen] == s).flatten()
            u = length * self.positions[s].T[self.row[chosen[mine]]]
            v = self.channels[s].T[self.column[chosen[mine]]]
            part = (
                v.unsqueeze(2) * u.unsqueeze(1)
                if g.channels_first
                else u.unsqueeze(2) * v.unsqueeze(1)
            )
            if len(self.grids) == 1:
                return part.flatten(1)
            rows[mine, g.offset : g.offset + g.size] = part.flatten(1)
        return rows

    def lift(self, c: Tensor) -> Tensor:
        """From coordinates (n, m) to rows of all sites (n, dimensions)."""
        rows = c.new_zeros(len(c), self.dimensions)
        for s, (g, u, v) in enumerate(zip(self.grids, self.positions, self.channels, strict=True)):
            mine = torch.nonzero(self.site == s).flatten()
            if len(mine):
                full = c.new_zeros(len(c), u.size(1) * v.size(1))
                full[:, self.row[mine] * v.size(1) + self.column[mine]] = c[:, mine]
                g.paste(rows, _along(u, full.view(-1, u.size(1), v.size(1))) @ v.T)
        return rows

    def coordinates(self, rows: Tensor) -> Tensor:
        """From rows of all sites (n, dimensions) to coordinates (n, m)."""
        c = rows.new_zeros(len(rows), self.size)
        for s, (g, u, v) in enumerate(zip(self.grids, self.positions, self.channels, strict=True)):
            mine = torch.nonzero(self.site == s).flatten()
            if len(mine):
                full = (_along(u.T, g.cut(rows)) @ v).flatten(1)
                c[:, mine] = full[:, self.row[mine] * v.size(1) + self.column[mine]]
        return c


def needed(space: Space, shaped: Tensor) -> int:
    """Number of leading directions, so that every point has enough outside of its padding."""
    most = int(shaped.max())
    if space.mask is None:
        return most
    parts = [g.cut(space.mask)[:, :, 0].sum(1).clamp(min=1) / g.positions for g in space.grids]
    return math.ceil(most / min(float(part.min()) for part in parts)) + max(
        g.positions for g in space.grids
    )


def real_directions(space: Space, known: Basis) -> Tensor:
    """Directions outside of a point's padding, shape (B, m) or (1, m)."""
    if space.mask is None:
        return torch.ones(1, known.size, dtype=torch.bool, device=space.device)
    real = torch.ones(space.size, known.size, dtype=torch.bool, device=space.device)
    for s, g in enumerate(space.grids):
        if not g.aligned:
            mine = torch.nonzero(known.site == s).flatten()
            real[:, mine] = g.cut(space.mask)[:, :, 0].bool()[:, known.row[mine]]
    return real


def ordered(space: Space, known: Basis, most: int) -> tuple[Tensor, Tensor]:
    """Expected energies by point, (B, m) or (1, m), and each point's order of directions."""
    size = space.size
    if space.mask is None:
        return known.energy.unsqueeze(0), torch.arange(most).expand(size, most)
    real = real_directions(space, known)
    energy = torch.where(real, known.energy, 0.0)
    for s, g in enumerate(space.grids):
        if not g.aligned:  # the energy of all positions lies in the real ones
            mine = torch.nonzero(known.site == s).flatten()
            valid = g.cut(space.mask)[:, :, 0].sum(1, keepdim=True).clamp(min=1)
            energy[:, mine] *= g.positions / valid
    # Positions are exchangeable: measured ones are chosen at random; padding comes last.
    ones, points = [1] * size, torch.arange(size)
    stream = NoiseStream("gaussian", (*space.key, 2), space.ids, ones, known.size, space.device)
    chance = torch.special.ndtr(stream.rows(points, torch.zeros_like(points)))
    wish = torch.where(real, energy * (1 + 1e-3 * chance), -1.0)
    return energy, wish.argsort(dim=1, descending=True, stable=True)[:, :most].cpu()


def _along(matrix: Tensor, rows: Tensor) -> Tensor:
    """The matrix times each row (n, positions, channels); with few channels, one product for all.

    Otherwise a grey image would be a product of a matrix and a vector for every row.
    """
    n, positions, channels = rows.shape
    if channels > NARROW:
        return matrix @ rows
    flat = rows.transpose(1, 2).reshape(-1, positions) @ matrix.T
    return flat.view(n, channels, -1).transpose(1, 2)
