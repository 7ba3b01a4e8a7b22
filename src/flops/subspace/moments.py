"""Second moments of a site's gradients: what they are, how they are learned, and their basis.

Two small matrices describe a site's gradient G, positions x channels: M_T = E[G G^T] over positions
(tokens, pixels) and M_D = E[G^T G] over channels. They are learned after a step, from losses or
from all outputs, from estimates G = inside + outside: measured coordinates are exact, and the part
from isotropic queries has a known noise floor, which is subtracted. The noise is the same at all
positions and channels, and the signal is not, so each moment weighs the other axis by what is known
of its signal: M_D is learned from W_T^1/2 G and M_T from G W_D^1/2, see `Weights`. If the second
moment of G is the Kronecker product of M_T and M_D, that changes the noise only. An axis of more
than 2,048 entries keeps only its leading eigenpairs and its trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.perturb.random import CPU, fill
from flops.subspace.basis import Basis, Grid, Space, signed
from flops.subspace.joint_moments import JointChange, joint_changes
from flops.subspace.measurements import Features, Measurements
from flops.subspace.regression import Regression

DENSE = 2048  # longest axis with a full matrix
SKETCH = 128  # eigenpairs of a longer one
FRESH = 16  # random directions added to a sketch
LEADING = 256  # minimum of directions with their own energy; the others share the rest
FLAT = 0.25  # least weight of a direction of the other axis, over the largest
ROOM = 1 << 22  # values of all gradients that the moments learn from, if there are several a point


@dataclass(frozen=True)
class Change:
    """Change of a moment in a step: plus^T plus - minus^T minus - floor I + V diag(cover) V^T."""

    plus: Tensor
    minus: Tensor
    floor: float
    vectors: Tensor
    cover: Tensor

    def times(self, x: Tensor) -> Tensor:
        """The change applied to columns, without forming its matrix."""
        grown = self.plus.T @ (self.plus @ x) - self.minus.T @ (self.minus @ x)
        return grown - self.floor * x + (self.vectors * self.cover) @ (self.vectors.T @ x)

    def trace(self) -> float:
        """Its trace."""
        squares = self.plus.square().sum() - self.minus.square().sum() + self.cover.sum()
        return float(squares) - self.floor * self.plus.size(1)

    def matrix(self) -> Tensor:
        """Its matrix."""
        plus = self.plus
        return self.times(torch.eye(plus.size(1), dtype=plus.dtype, device=plus.device))

    def dense(self) -> Tensor | None:
        """Its matrix, if the axis is short."""
        return self.matrix() if self.plus.size(1) <= DENSE else None


@dataclass(frozen=True)
class Factor:
    """A second moment over one axis: a matrix, or the leading eigenpairs of a large one."""

    matrix: Tensor | None
    vectors: Tensor
    values: Tensor
    trace: float

    @classmethod
    def empty(cls, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Factor:
        """A moment without data."""
        none = torch.zeros(size, 0, dtype=dtype, device=device)
        matrix = none.new_zeros(size, size) if size <= DENSE else None
        return cls(matrix, none, none[0], 0.0)

    @property
    def size(self) -> int:
        """Entries of the axis."""
        return len(self.vectors)

    def updated(self, keep: float, change: Change | JointChange, step: int) -> Factor:
        """The old moment times ``keep``, plus the change."""
        if self.matrix is not None:
            return Factor(keep * self.matrix + change.matrix(), self.vectors, self.values, 0)
        fresh = fill("gaussian", (self.size, step), self.vectors.new_empty(self.size, FRESH))

        def times(x: Tensor) -> Tensor:
            return keep * (self.vectors * self.values) @ (self.vectors.T @ x) + change.times(x)

        # One step of subspace iteration from the known and a few random directions.
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
        """Eigenvectors, eigenvalues, and the mean eigenvalue of the other directions."""
        if self.matrix is not None:
            values, vectors = torch.linalg.eigh(self.matrix)
            return signed(vectors), values.clamp(min=0), 0.0
        rest = max(0.0, self.trace - float(self.values.sum()))
        return self.vectors, self.values, rest / (self.vectors.size(0) - self.vectors.size(1))


@dataclass(frozen=True)
class Moments:
    """Both moments of a site; only channels if positions are not aligned."""

    positions: Factor | None
    channels: Factor

    @classmethod
    def empty(cls, g: Grid, dtype: torch.dtype, device: torch.device = CPU) -> Moments:
        """Moments without data."""
        positions = Factor.empty(g.positions, dtype, device) if g.aligned else None
        return cls(positions, Factor.empty(g.channels, dtype, device))

    def to_memory(self) -> dict[str, Any]:
        """Plain values, for `state_dict`."""
        return {n: None if f is None else dict(vars(f)) for n, f in vars(self).items()}

    @classmethod
    def from_memory(
        cls, kept: Mapping[str, Any], dtype: torch.dtype, device: torch.device = CPU
    ) -> Moments:
        """Restore from `to_memory`, in this precision and on this device."""

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


def kept_moments(kept: Sequence[Any], space: Space) -> list[Moments]:
    """Moments so far; a site whose positions are no longer aligned keeps its channels."""
    found = [Moments.empty(g, space.dtype, space.device) for g in space.grids]
    if len(kept) != len(found):
        return found
    for s, (g, saved) in enumerate(zip(space.grids, kept, strict=True)):
        m = Moments.from_memory(saved, space.dtype, space.device)
        m = m if g.aligned else Moments(None, m.channels)
        along = m.positions is None or m.positions.size == g.positions
        if m.channels.size == g.channels and along:
            found[s] = m
    return found


def leading(grids: Sequence[Grid], moments: Sequence[Moments], most: int) -> Basis:
    """The most energetic directions of all sites: at least ``LEADING``, and ``most``."""
    us, vs, energies, total = [], [], [], 0.0
    dimensions = grids[-1].offset + grids[-1].size
    for g, m in zip(grids, moments, strict=True):
        v, across, rest = m.channels.eigenpairs()
        total += float(across.sum()) + rest * (g.channels - len(across))
        if m.positions is None:  # all positions equal
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


@dataclass(frozen=True)
class Seen:
    """What the moments learn from: P gradients, of losses or in directions of the outputs.

    Attributes:
        inside: Their measured part, shape (P, dimensions).
        outside: Isotropic estimate of the rest, shape (P, dimensions).
        missed: Mean squared residual after the measured part, shape (P,).
        energy: Energy of the gradients of the same point, shape (P,).
        point: Point of each.
        n: Isotropic draws of each.
    """

    inside: Tensor
    outside: Tensor
    missed: Tensor
    energy: Tensor
    point: Tensor
    n: Tensor


def _of_losses(measurements: Measurements, found: Regression) -> Seen:
    """The gradient of every point's loss."""
    point = torch.arange(len(found.missed), device=found.missed.device)
    n = measurements.iso.clamp(min=1).to(found.missed)
    return Seen(found.inside, found.outside, found.missed, found.energy, point, n)


def _of_features(measurements: Measurements, features: Features) -> Seen:
    """What the gradient of every point would be for the residuals of others."""
    known, space, u = measurements.known, measurements.space, measurements.predicted
    w, c, a = (x @ features.roots.T for x in (features.w, features.c, features.a))
    size, more = len(w), w.size(2)
    outside = w.new_zeros(size, more, space.dimensions)
    missed = w.new_zeros(size, more)
    for points, real, whole in measurements.blocks():
        seen = whole if space.mask is None else whole * space.mask[points].unsqueeze(1)
        e = known.coordinates(seen.flatten(0, 1)).view(*real.shape, -1)
        derivatives = torch.where(real.unsqueeze(2), w[points, : real.size(1)], 0.0)
        r = derivatives - e @ c[points]
        if u is not None:
            r = r - (seen @ u[points].unsqueeze(2)) * a[points].unsqueeze(1)
        r = torch.where(real.unsqueeze(2), r, 0.0).transpose(1, 2)  # (b, q, n)
        in_e = (r @ e) * measurements.measured[points].unsqueeze(1)
        outside[points] = r @ seen - known.lift(in_e.flatten(0, 1)).view(len(points), more, -1)
        missed[points] = r.square().sum(2)
    n = measurements.fitted.clamp(min=1).to(missed).unsqueeze(1)
    outside, missed = outside / n.unsqueeze(2), missed / n
    inside = known.lift(c.transpose(1, 2).flatten(0, 1)).view_as(outside)
    if u is not None:
        inside = inside + a.unsqueeze(2) * u.unsqueeze(1)
    energy = inside.square().sum((1, 2)) + missed.sum(1)
    point = torch.arange(size, device=w.device).repeat_interleave(more)
    return Seen(
        inside.flatten(0, 1),
        outside.flatten(0, 1),
        missed.flatten(),
        energy[point],
        point,
        n.squeeze(1)[point],
    )


def learn(
    measurements: Measurements,
    found: Regression,
    moments: Sequence[Moments],
    keep: float,
    step: int,
    losses: Tensor,
    replicas: Replicas | None = None,
) -> list[Moments]:
    """The moments after this step.

    Points are weighted by inverse variance: the noise of a point's outer product is about its
    energy over its number n of isotropic queries. For Gaussian z,
    E[out out^T] = (1 + 1/n) g g^T + |g|^2 / n I in the unmeasured directions.

    With outputs, g is replaced by the gradients that the point would have for the residuals of the
    batch: their second moment is J^T R J, with R that of the residuals.

    The change is a sum over the points, to which all replicas add theirs.
    """
    changes = _changes(measurements, found, moments, losses)
    updates: Iterator[Change | JointChange] = iter(changes)
    if replicas is not None and replicas.several:
        updates = iter(joint_changes(changes, replicas))
    learned = []
    for m in moments:
        positions = m.positions
        if positions is not None:
            positions = positions.updated(keep, next(updates), step)
        learned.append(Moments(positions, m.channels.updated(keep, next(updates), step)))
    return learned


def _changes(
    measurements: Measurements, found: Regression, moments: Sequence[Moments], losses: Tensor
) -> list[Change]:
    """Changes of all moments by these points: of each site's positions, if any, and channels."""
    space, known = measurements.space, measurements.known
    features = measurements.features
    most = ROOM // (space.size * space.dimensions)  # directions of residuals
    if features is None or most < min(2, len(features.roots)):
        seen = _of_losses(measurements, found)
        resolution = torch.finfo(losses.dtype).eps * float(losses.abs().max()) / space.sigma
    else:
        seen = _of_features(measurements, replace(features, roots=features.roots[:most]))
        resolution = features.resolution
    n, audible = seen.n, seen.energy > (10 * resolution) ** 2
    live = audible & (measurements.iso > 0).to(space.device)[seen.point]
    weight = torch.where(live, n.square() / torch.where(live, seen.energy, 1.0), 0.0)
    over = 1 / (n + 1)
    plus = (seen.inside + seen.outside) * weight.sqrt().unsqueeze(1)
    minus = seen.outside * (weight * over).sqrt().unsqueeze(1)
    floor = weight * (1 - over) * seen.missed / n
    cover = (floor.unsqueeze(1) * measurements.measured[seen.point]).sum(0)
    changes: list[Change] = []

    def change(both: list[Tensor], floor: float, u: Tensor, number: Tensor, cover: Tensor) -> None:
        summed = cover.new_zeros(u.size(1)).index_add_(0, number, cover)
        plus, minus = both
        changes.append(Change(plus, minus, floor, u, summed))

    for s, (m, g) in enumerate(zip(moments, space.grids, strict=True)):
        mine = torch.nonzero(known.site == s).flatten()
        used = torch.full_like(floor, g.positions)
        if not g.aligned and space.mask is not None:
            used = g.cut(space.mask)[:, :, 0].sum(1).to(floor)[seen.point]
        u, v = known.positions[s], known.channels[s]
        row, column, both = known.row[mine], known.column[mine], (g.cut(plus), g.cut(minus))
        if m.positions is not None:
            weights = Weights.of(m.channels, v)
            turned = [weights.root(x.transpose(1, 2)).flatten(0, 1) for x in both]
            total = float(floor.sum()) * g.channels * weights.mean()
            change(turned, total, u, row, cover[mine] * weights.values[column])
        weights = Weights.of(m.positions, u)
        turned = [weights.root(x).flatten(0, 1) for x in both]
        total = float((floor * used).sum()) * weights.mean()
        change(turned, total, v, column, cover[mine] * weights.values[row])
    return changes


@dataclass(frozen=True)
class Weights:
    """Weights of an axis's directions, for what is learned of the other one.

        W = (f I + (1 - f) M / lambda) / mean,  lambda the largest eigenvalue of M

    In proportion to the eigenvalues they are best if directions differ in energy alone, and their
    noise is larger than that. The flat share f keeps the weak ones, which may have other gradients
    along the other axis. By their mean, tr(W M) = tr(M): the energy of a Kronecker product stays.

    Attributes:
        vectors: Eigenvectors.
        values: Their weights.
        rest: Weight of all other directions.
    """

    vectors: Tensor
    values: Tensor
    rest: float

    @classmethod
    def of(cls, factor: Factor | None, vectors: Tensor) -> Weights:
        """Weights by a moment with these eigenvectors; all 1 if it is None or without data."""
        values, trace = vectors.new_zeros(vectors.size(1)), 0.0
        if factor is not None and factor.matrix is not None:
            values = (vectors * (factor.matrix @ vectors)).sum(0).clamp(min=0)
            trace = float(factor.matrix.trace())
        elif factor is not None:
            values, trace = factor.values, factor.trace
        total, others = float(values.sum()), vectors.size(0) - vectors.size(1)
        rest = max(0.0, trace - total) / max(1, others)
        largest = float(values.max()) if len(values) else 0.0
        if not largest > 0:
            return cls(vectors[:, :0], torch.ones_like(values), 1.0)
        weights = FLAT + (1 - FLAT) * values / largest
        beyond = FLAT + (1 - FLAT) * min(1.0, rest / largest)
        signal = float((weights * values).sum()) + others * rest * beyond
        mean = signal / (total + others * rest)
        return cls(vectors, weights / mean, beyond / mean)

    def root(self, x: Tensor) -> Tensor:
        """The root of the weights applied to columns, shape (..., size, columns)."""
        scale = math.sqrt(self.rest)
        if not self.vectors.size(1):
            return x * scale
        turned = (self.values.sqrt() - scale).unsqueeze(1) * (self.vectors.T @ x)
        return scale * x + self.vectors @ turned

    def mean(self) -> float:
        """Mean weight of all directions."""
        size, known = self.vectors.shape
        return float(self.values[:known].sum() + self.rest * (size - known)) / size
