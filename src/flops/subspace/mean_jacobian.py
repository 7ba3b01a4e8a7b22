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

    def updated(self, measurements: Measurements, features: Features) -> MeanJacobian:
        """After a step."""
        known, mean = measurements.known, self.values
        *new, isotropic = _rows(measurements, features)
        if not len(new[0]):
            return self
        most = _room(measurements.space)
        young = AGE * self.count > LEAST  # the others say nothing any more
        old = (self.z[young], self.y[young], AGE * self.count[young])
        kept = tuple(torch.cat([a, b])[:most] for a, b in zip(new, old, strict=True))
        z, y, count = kept
        measured = _own_share(measurements, features)
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


def _own_share(measurements: Measurements, features: Features) -> float | None:
    """Share of energy that points do not have in common; None if no direction was shared."""
    often = measurements.measured.sum(0).to(features.c)
    c = features.c[:, often > 1] * measurements.measured[:, often > 1].unsqueeze(2)
    n = often[often > 1].unsqueeze(1)
    squares, mean = c.square().sum(0), c.sum(0) / n
    spread = (squares - n * mean.square()) / (n - 1)  # of one point
    whole = float((squares / n).sum())
    return min(1.0, max(0.0, float(spread.sum()) / whole)) if whole > 0 else None


def _room(space: Space) -> int:
    """Rows of a system."""
    size = space.dimensions
    return max(2, min(ROWS, int((WORK / size) ** 0.5), ROOM // size))


def _rows(measurements: Measurements, features: Features) -> tuple[Tensor, Tensor, Tensor, int]:
    """Noise, derivatives of the features, number of points; and how many of the last are isotropic.

    Points that measured the same direction share a row.
    """
    space, known, u = measurements.space, measurements.known, measurements.predicted
    zs, ys, counts = [], [], []
    measured = measurements.measured
    often = measured.sum(0)
    used = torch.nonzero(often > 0).flatten()
    if len(used):
        zs.append(known.rows(used).to(space.dtype))
        sums = (features.c * measured.unsqueeze(2)).sum(0)[used]
        ys.append(sums / often[used].unsqueeze(1))
        counts.append(often[used].to(space.dtype))
    if u is not None:
        there = torch.nonzero(u.square().sum(1) > 0).flatten()
        zs.append(u[there])
        ys.append(features.a[there])
        counts.append(torch.ones(len(there), dtype=space.dtype, device=u.device))
    if zs:  # at most half of the room: isotropic rows look everywhere
        half = _room(space) // 2
        zs, ys, counts = ([torch.cat(x)[:half]] for x in (zs, ys, counts))
    fixed = sum(map(len, zs))
    room = _room(space) - fixed
    live = max(1, int((measurements.iso > 0).sum()))
    each = max(1, room // live)
    for points, real, whole in measurements.blocks():
        n = min(each, real.size(1))
        seen = (
            whole[:, :n] if space.mask is None else whole[:, :n] * space.mask[points].unsqueeze(1)
        )
        keep = real[:, :n]
        zs.append(seen[keep])
        ys.append(features.w[points, :n][keep])
        counts.append(torch.ones(int(keep.sum()), dtype=space.dtype, device=seen.device))
    if not zs:
        none = measurements.w.new_zeros(0, space.dimensions)
        return none, none.new_zeros(0, features.w.size(2)), none.new_zeros(0), 0
    found = torch.cat(zs)
    return found, torch.cat(ys), torch.cat(counts), len(found) - fixed
