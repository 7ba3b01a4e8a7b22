"""The mean Jacobian: what all points have in common, which predicts the gradient of each.

The gradient of a point's loss is J^T r. Its residual r is known from the clean pass; of its
Jacobian J, the mean over points M is learned from the queries of all points and steps. So M^T r
predicts the gradient before the first query. In a language model that is asked for a label word,
most of J is common to all points in the later layers, and the prediction needs only its length.

Along a row z of noise, the features of a point's outputs have the derivative J z = M z + (J - M) z.
All rows of a step, and of the last steps as far as there is room, form one system, with the learned
covariance Lambda as prior of the error of M and the deviations of points as noise:

    M += Lambda Z^T (Z Lambda Z^T + N)^-1 (Y - Z M^T)

N is proportional to the diagonal. Its factor is the energy of the deviations over that of the error
of M: the share of energy that points do not have in common is seen where several of them measured
the same direction, and the rest of the residuals of isotropic rows is the error of M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.basis import Space
from flops.subspace.measurements import Features, Measurements

ROWS, WORK, ROOM = 1024, 1_000_000_000, 1 << 21  # rows of a system; their products; their values
AGE = 0.8  # weight of a row of the step before
OWN, RATE = 0.1, 0.2  # assumed share of energy that points do not have in common, and its update
LEAST, MOST = 1e-3, 1e3  # noise over prior variance


@dataclass(frozen=True)
class MeanJacobian:
    """The mean Jacobian of some features, and what it was learned from last.

    Attributes:
        name: Identifies the features.
        values: Shape (p, dimensions).
        measured: Share of the energy that points do not have in common; None if unknown.
        z: Latest rows of noise, the newest first, shape (rows, dimensions).
        y: Their derivatives of the features, shape (rows, p).
        count: Points of each row, less by age, shape (rows,).
    """

    name: Any
    values: Tensor
    measured: float | None
    z: Tensor
    y: Tensor
    count: Tensor

    @classmethod
    def empty(cls, name: Any, features: int, space: Space) -> MeanJacobian:
        """Without data."""
        values = torch.zeros(features, space.dimensions, dtype=space.dtype, device=space.device)
        return cls(name, values, None, values[:0], values.new_zeros(0, features), values[:0, 0])

    @classmethod
    def from_memory(
        cls, kept: Mapping[str, Any] | None, name: Any, features: int, space: Space
    ) -> MeanJacobian:
        """Restore from `vars`; empty if the features or the space are others now."""
        if kept is None or kept["name"] != name:
            return cls.empty(name, features, space)
        if kept["values"].shape != (features, space.dimensions):
            return cls.empty(name, features, space)
        parts = {n: kept[n].to(space.device, space.dtype) for n in ("values", "z", "y", "count")}
        return cls(name, measured=kept["measured"], **parts)

    @property
    def common(self) -> float:
        """Share of the energy that points have in common."""
        return 1 - (OWN if self.measured is None else self.measured)

    def updated(
        self, measurements: Measurements, features: Features, replicas: Replicas | None = None
    ) -> MeanJacobian:
        """After a step, from the rows of all replicas."""
        known, mean = measurements.known, self.values
        replicas = replicas or Replicas(len(measurements.iso))
        new, isotropic, measured = _rows(measurements, features, replicas)
        if not len(new[0]):
            return self
        most = _room(measurements.space)
        young = AGE * self.count > LEAST  # the others say nothing any more
        old = (self.z[young], self.y[young], AGE * self.count[young])
        kept = tuple(torch.cat([a, b])[:most] for a, b in zip(new, old, strict=True))
        z, y, count = kept
        if measured is None or self.measured is None:
            measured = self.measured if measured is None else measured
        else:
            measured = (1 - RATE) * self.measured + RATE * measured
        residual = y - z @ mean.T
        # Half of the prior is flat: the first directions are wrong, and M is to be right anywhere.
        e, flat = known.coordinates(z), 1 / z.size(1)
        energy, rest = (known.energy + flat) / 2, (known.rest + flat) / 2
        kernel = (e * (energy - rest)) @ e.T + rest * (z @ z.T)
        first = slice(len(new[0]) - isotropic, len(new[0]))
        whole, left = (float(x[first].double().square().sum()) for x in (y, residual))
        own = min(OWN * whole, left / 2) if measured is None else measured * whole
        ridge = own / max(left - own, LEAST * whole, 1e-300)
        diagonal = kernel.diagonal().clamp(min=LEAST * float(kernel.diagonal().mean()) + 1e-30)
        noise = min(MOST, max(LEAST, ridge)) * diagonal / count
        system = (kernel + torch.diag(noise)).double()
        alpha = torch.cholesky_solve(residual.double(), torch.linalg.cholesky(system)).to(z)
        moved = known.lift((alpha.T @ e) * (energy - rest)) + rest * (alpha.T @ z)
        return MeanJacobian(self.name, mean + moved, measured, *kept)


@dataclass(frozen=True)
class _Directions:
    """Measured directions: points of all replicas that measured each, and sums over them.

    Attributes:
        often: Points, shape (m,).
        sums: Of the derivatives of the features, shape (m, p).
        squares: Of their squares, shape (m, p).
        live: Points with isotropic draws, of all replicas.
        predicted: Points with a predicted direction, by replica.
    """

    often: Tensor
    sums: Tensor
    squares: Tensor
    live: int
    predicted: list[int]

    @classmethod
    def of(
        cls, measurements: Measurements, features: Features, replicas: Replicas, predicted: int
    ) -> _Directions:
        """Sums over all points."""
        measured = measurements.measured
        c, live = features.c * measured.unsqueeze(2), int((measurements.iso > 0).sum())
        mine = [measured.sum(0).to(c), c.sum(0), c.square().sum(0), c.new_ones(1) * live]
        often, sums, squares, points = replicas.sum(mine)
        return cls(often, sums, squares, int(points), _counted(predicted, replicas))

    def own_share(self) -> float | None:
        """Share of energy that points do not have in common; None if no direction was shared."""
        several = self.often > 1
        n, squares = self.often[several].unsqueeze(1), self.squares[several]
        spread = (squares - self.sums[several].square() / n) / (n - 1)  # of one point
        whole = float((squares / n).sum())
        return min(1.0, max(0.0, float(spread.sum()) / whole)) if whole > 0 else None


def _room(space: Space) -> int:
    """Rows of a system."""
    size = space.dimensions
    return max(2, min(ROWS, int((WORK / size) ** 0.5), ROOM // size))


def _rows(
    measurements: Measurements, features: Features, replicas: Replicas
) -> tuple[tuple[Tensor, Tensor, Tensor], int, float | None]:
    """Noise, derivatives of the features and number of points of each row, on all replicas.

    Points that measured the same direction share a row. Also how many of the last rows are
    isotropic, and the share of energy that points do not have in common.
    """
    space, known, u = measurements.space, measurements.known, measurements.predicted
    none = measurements.w.new_zeros(0, space.dimensions)
    there = torch.zeros(0, dtype=torch.long, device=space.device)
    if u is not None:
        there = torch.nonzero(u.square().sum(1) > 0).flatten()
    shared = _Directions.of(measurements, features, replicas, len(there))
    half = _room(space) // 2  # at most: isotropic rows look everywhere
    used = torch.nonzero(shared.often > 0).flatten()[:half]
    often = shared.often[used].to(space.dtype)
    zs, ys, counts = [none], [none.new_zeros(0, features.w.size(2))], [none[:, 0]]
    if len(used):
        zs.append(known.rows(used).to(space.dtype))
        ys.append(shared.sums[used] / often.unsqueeze(1))
        counts.append(often)
    own = (none, features.a[:0]) if u is None else (u[there], features.a[there])
    predicted = _gathered(own, half - len(used), shared.predicted, replicas)
    zs, ys = [*zs, predicted[0]], [*ys, predicted[1]]
    fixed = sum(map(len, zs))
    room = _room(space) - fixed
    each = max(1, room // max(1, shared.live))
    own_z, own_y = [none], [features.w[0, :0]]
    for points, real, whole in measurements.blocks():
        n = min(each, real.size(1))
        seen = (
            whole[:, :n] if space.mask is None else whole[:, :n] * space.mask[points].unsqueeze(1)
        )
        keep = real[:, :n]
        own_z.append(seen[keep])
        own_y.append(features.w[points, :n][keep])
    isotropic = (torch.cat(own_z), torch.cat(own_y))
    sizes = _counted(len(isotropic[0]), replicas)
    isotropic = _gathered(isotropic, room, sizes, replicas)
    z, y = torch.cat([*zs, isotropic[0]]), torch.cat([*ys, isotropic[1]])
    ones = none.new_ones(len(predicted[0]) + len(isotropic[0]))
    return (z, y, torch.cat([*counts, ones])), len(isotropic[0]), shared.own_share()


def _counted(rows: int, replicas: Replicas) -> list[int]:
    """Number of rows of each replica."""
    found = replicas.gather(torch.tensor([rows]), [1] * len(replicas.sizes))
    return [int(x) for x in found]


def _gathered(
    own: tuple[Tensor, Tensor], most: int, sizes: list[int], replicas: Replicas
) -> tuple[Tensor, Tensor]:
    """Rows of all replicas; of too many, the first of each.

    Args:
        own: Noise and derivatives of this replica's rows.
        most: Rows of all replicas.
        sizes: Rows of each.
        replicas: The replicas.
    """
    z, y = own
    if not replicas.several:
        return z[:most], y[:most]
    if sum(sizes) > most:
        sizes = [min(size, max(1, most // len(sizes))) for size in sizes]
    mine = torch.cat([z, y.to(z)], 1)[: sizes[replicas.rank]]
    whole = replicas.gather(mine, sizes)[:most]
    z, y = whole.split([z.size(1), y.size(1)], 1)
    return z.contiguous(), y.contiguous()
