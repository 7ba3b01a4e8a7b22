"""The basis of shaped queries: directions in the order of the energy expected there.

Eigenvectors of a site's two moments give directions u v^T (one site at a time), products of the
eigenvalues their energies. The energies of all sites of a group are sorted together; a point with
a shaped queries asks the first a of them, one direction a query. No choice of a gives more: for a
gradient with this second moment the leading eigenvectors are the best a linear measurements, and
each answer *is* the coordinate, so nothing has to be solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.subspace.moments import Grid, Moments

LEADING = 256  # directions with an energy of their own, at least; the others share what is left


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
        rest: The same for each direction that is not among them.
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
        """The directions themselves, by number, as rows of all sites."""
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
                g.paste(rows, u @ full.view(-1, u.size(1), v.size(1)) @ v.T)
        return rows

    def coordinates(self, rows: Tensor) -> Tensor:
        """From rows of all sites (n, dimensions) to coordinates (n, m)."""
        c = rows.new_zeros(len(rows), self.size)
        for s, (g, u, v) in enumerate(zip(self.grids, self.positions, self.channels, strict=True)):
            mine = torch.nonzero(self.site == s).flatten()
            if len(mine):
                full = (u.T @ g.cut(rows) @ v).flatten(1)
                c[:, mine] = full[:, self.row[mine] * v.size(1) + self.column[mine]]
        return c


def leading(grids: Sequence[Grid], moments: Sequence[Moments], most: int) -> Basis:
    """The most energetic directions of all sites: ``LEADING`` or ``most``, if more are asked."""
    us, vs, energies, total = [], [], [], 0.0
    dimensions = grids[-1].offset + grids[-1].size
    for g, m in zip(grids, moments, strict=True):
        v, across, rest = m.channels.eigenpairs()
        total += float(across.sum()) + rest * (g.channels - len(across))
        if m.positions is None:  # every position alike
            u = torch.eye(g.positions, dtype=v.dtype, device=v.device)
            along = v.new_full((g.positions,), 1 / g.positions)
        else:
            u, along, rest = m.positions.eigenpairs()
            along = along / max(float(along.sum()) + rest * (g.positions - len(along)), 1e-30)
        us.append(u)
        vs.append(v)
        energies.append((along.unsqueeze(1) * across).flatten())
    every = torch.cat(energies)
    every = every / total if total > 0 else torch.full_like(every, 1 / dimensions)
    size = min(len(every), max(most, LEADING))
    energy, order = every.sort(descending=True, stable=True)
    order, energy = order[:size], energy[:size]
    starts = torch.tensor([0, *(len(e) for e in energies)]).cumsum(0).to(order.device)
    site = torch.bucketize(order, starts[1:], right=True)
    place = order - starts[site]
    width = torch.tensor([v.size(1) for v in vs]).to(order.device)[site]
    others = dimensions - size
    rest = max(0.0, 1 - float(energy.sum())) / others if others else 0.0
    return Basis(
        tuple(grids), tuple(us), tuple(vs), site, place // width, place % width, energy, rest
    )
