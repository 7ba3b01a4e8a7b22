"""Second moments of the gradient at a site, over positions and over channels.

Two small matrices describe where a site's gradient lives: M_T = E[G G^T] over positions (tokens,
pixels) and M_D = E[G^T G] over channels, for G the gradient as a matrix positions x channels. They
are learned from estimates of it, G = inside + outside: what was measured in known directions is
exact, what isotropic queries add outside of these has a noise floor that is known and subtracted.

An axis of more than 2,048 entries keeps its leading eigenpairs and its trace only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flops.perturb.activations import Site
from flops.perturb.random import CPU, fill

DENSE = 2048  # longest axis with a matrix of its own
SKETCH = 128  # eigenpairs kept of a longer one
FRESH = 16  # random directions by which a sketch finds new ones


@dataclass(frozen=True)
class Grid:
    """A site as a matrix of positions and channels.

    Attributes:
        offset: Where the site starts in a row of all sites.
        positions: Tokens or pixels; 1 for a flat site.
        channels: Channels.
        channels_first: Whether channels come before positions in memory.
        aligned: Whether a position means the same in every point. If not (sequences of varying
            length), only the channels are learned.
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
        channels_first: Whether two axes are (C, L), as behind a one-dimensional convolution.
    """
    shape = site.row_shape
    if len(shape) >= 3 or (len(shape) == 2 and channels_first):
        return Grid(site.offset, site.size // shape[0], shape[0], channels_first=True)
    if len(shape) == 2:
        return Grid(site.offset, shape[0], shape[1])
    return Grid(site.offset, 1, site.size)


@dataclass(frozen=True)
class Change:
    """What a step adds to a moment: plus^T plus - minus^T minus - floor I + V diag(cover) V^T."""

    plus: Tensor
    minus: Tensor
    floor: float
    vectors: Tensor
    cover: Tensor

    def times(self, x: Tensor) -> Tensor:
        """The change applied to columns, without making its matrix."""
        grown = self.plus.T @ (self.plus @ x) - self.minus.T @ (self.minus @ x)
        return grown - self.floor * x + (self.vectors * self.cover) @ (self.vectors.T @ x)

    def trace(self) -> float:
        """Its trace."""
        squares = self.plus.square().sum() - self.minus.square().sum() + self.cover.sum()
        return float(squares) - self.floor * self.plus.size(1)


def signed(vectors: Tensor) -> Tensor:
    """The columns, each with its largest entry positive; the first of those that are alike.

    The sign that an eigenvector comes with hangs on rounding, and queries along v and along -v
    differ by the curvature: without this, processes and threads would do so, too.
    """
    sizes = vectors.abs()
    alike = sizes >= (1 - 1e-6) * sizes.amax(0)
    largest = vectors.gather(0, alike.int().argmax(0, keepdim=True))  # argmax: the first
    return torch.where(largest < 0, -vectors, vectors).contiguous()


@dataclass(frozen=True)
class Factor:
    """A second moment over one axis: a matrix, or the leading eigenpairs of a large one."""

    matrix: Tensor | None
    vectors: Tensor
    values: Tensor
    trace: float

    @classmethod
    def empty(cls, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Factor:
        """Nothing is known."""
        none = torch.zeros(size, 0, dtype=dtype, device=device)
        matrix = none.new_zeros(size, size) if size <= DENSE else None
        return cls(matrix, none, none[0], 0.0)

    @property
    def size(self) -> int:
        """Entries of the axis."""
        return len(self.vectors)

    def updated(self, keep: float, change: Change, step: int) -> Factor:
        """The old moment times ``keep``, plus the change."""
        if self.matrix is not None:
            matrix = self.matrix
            identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
            return Factor(keep * matrix + change.times(identity), self.vectors, self.values, 0)
        fresh = fill("gaussian", (self.size, step), self.vectors.new_empty(self.size, FRESH))

        def times(x: Tensor) -> Tensor:
            return keep * (self.vectors * self.values) @ (self.vectors.T @ x) + change.times(x)

        # One step of subspace iteration from what was known and a few random directions.
        start = torch.cat([self.vectors, fresh], 1)
        basis = torch.linalg.qr(times(torch.linalg.qr(times(start)).Q)).Q
        values, turn = torch.linalg.eigh(basis.T @ times(basis))
        vectors = signed((basis @ turn).flip(1)[:, :SKETCH])
        return Factor(
            None,
            vectors,
            values.flip(0)[:SKETCH].clamp(min=0),
            keep * self.trace + change.trace(),
        )

    def eigenpairs(self) -> tuple[Tensor, Tensor, float]:
        """Eigenvectors, eigenvalues, and the mean eigenvalue of the directions left out."""
        if self.matrix is not None:
            values, vectors = torch.linalg.eigh(self.matrix)
            return signed(vectors), values.clamp(min=0), 0.0
        rest = max(0.0, self.trace - float(self.values.sum()))
        return self.vectors, self.values, rest / (self.vectors.size(0) - self.vectors.size(1))


@dataclass(frozen=True)
class Moments:
    """Both moments of a site; without positions if these are not aligned."""

    positions: Factor | None
    channels: Factor

    @classmethod
    def empty(cls, g: Grid, dtype: torch.dtype, device: torch.device = CPU) -> Moments:
        """Nothing is known."""
        positions = Factor.empty(g.positions, dtype, device) if g.aligned else None
        return cls(positions, Factor.empty(g.channels, dtype, device))

    def to_memory(self) -> dict[str, Any]:
        """Plain values, for the state."""
        return {n: None if f is None else dict(vars(f)) for n, f in vars(self).items()}

    @classmethod
    def from_memory(
        cls, kept: Mapping[str, Any], dtype: torch.dtype, device: torch.device = CPU
    ) -> Moments:
        """Back from the state, in this precision and on this device."""

        def factor(saved: Mapping[str, Any] | None) -> Factor | None:
            if saved is None:
                return None
            matrix, vectors, values = (saved[n] for n in ("matrix", "vectors", "values"))
            return Factor(
                None if matrix is None else matrix.to(device, dtype),
                vectors.to(device, dtype),
                values.to(device, dtype),
                float(saved["trace"]),
            )

        channels = factor(kept["channels"])
        assert channels is not None
        return cls(factor(kept["positions"]), channels)
