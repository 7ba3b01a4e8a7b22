"""The mean Jacobian: what all points have in common, which predicts the gradient of each.

The gradient of a point's loss is J^T r. Its residual r is known from the clean pass; of its
Jacobian J, the mean over points M is learned from the queries of all points and steps. So M^T r
predicts the gradient before the first query. In a language model that is asked for a label word,
most of J is common to all points in the later layers, and the prediction needs only its length.

Along a row z of noise, the features of a point's outputs have the derivative J z = M z + (J - M) z.
The second part is noise, of variance own * z^T Lambda z if points have a share ``own`` of their
energy for themselves and Lambda is the learned covariance, which is also the prior of M. At a site
of up to 2,048 dimensions all rows of all steps form normal equations, with weights by age, so that
about five rows per dimension count, or ten steps:

    (Z^T W Z + own / (1 - own) Lambda^-1) M^T = Z^T W Y,  W = diag(count / z^T Lambda z)

with the number of points that share a row, and a part of Lambda flat: M is to be right anywhere.

At a wider one only the latest rows are kept, as a system in the rows, with Lambda as prior of the
error of M. Its ratio of noise to prior is the energy of the deviations over that of the error:

    M += Lambda Z^T (Z Lambda Z^T + N)^-1 (Y - Z M^T)

``own`` is seen where several points measured the same direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.basis import Basis, Space
from flops.subspace.joint_moments import joint_symmetric
from flops.subspace.measurements import Features, Measurements

ROWS, WORK, ROOM = 1024, 1_000_000_000, 1 << 21  # rows of a system; their products; their values
AGE = 0.8  # weight of a row of the step before, if that had a row per dimension
OWN, RATE = 0.1, 0.2  # assumed share of energy that points do not have in common, and its update
LEAST, MOST = 1e-3, 1e3  # noise over prior variance
DENSE = 2048  # dimensions up to which normal equations are kept
OLDEST = 0.9  # weight of a row of the step before, if that had few rows
FLAT, FIRST_FLAT = 0.1, 0.5  # flat share of their prior, and if it was learned from the same rows
MOST_OWN = 0.95  # largest share of energy that points do not have in common, in their prior


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
        gram: Z^T W Z of all rows, less by age, (dimensions, dimensions); empty at a wide site,
            where the latest rows are kept instead.
        moment: Z^T W Y likewise, shape (dimensions, p).
    """

    name: Any
    values: Tensor
    measured: float | None
    z: Tensor
    y: Tensor
    count: Tensor
    gram: Tensor
    moment: Tensor

    @classmethod
    def empty(cls, name: Any, features: int, space: Space) -> MeanJacobian:
        """Without data."""
        values = torch.zeros(features, space.dimensions, dtype=space.dtype, device=space.device)
        z, y = (values.new_zeros(0, n) for n in (space.dimensions, features))
        size = space.dimensions if space.dimensions <= DENSE else 0
        gram, moment = (values.new_zeros(size, n) for n in (size, features))
        return cls(name, values, None, z, y, values.new_zeros(0), gram, moment)

    @classmethod
    def from_memory(
        cls, kept: Mapping[str, Any] | None, name: Any, features: int, space: Space
    ) -> MeanJacobian:
        """Restore from `vars`; empty if the features or the space are others now."""
        if kept is None or kept["name"] != name:
            return cls.empty(name, features, space)
        if kept["values"].shape != (features, space.dimensions) or "gram" not in kept:
            return cls.empty(name, features, space)
        names = ("values", "z", "y", "count", "gram", "moment")
        parts = {n: kept[n].to(space.device, space.dtype) for n in names}
        return cls(name, measured=kept["measured"], **parts)

    @property
    def common(self) -> float:
        """Share of the energy that points have in common."""
        return 1 - (OWN if self.measured is None else self.measured)

    def updated(
        self,
        measurements: Measurements,
        features: Features,
        replicas: Replicas | None = None,
        known: Basis | None = None,
    ) -> MeanJacobian:
        """After a step, from the rows of all replicas.

        Args:
            measurements: Its measurements.
            features: Their derivatives of the features.
            replicas: Ranks with other points; None for none.
            known: Basis of the prior, if it was learned from this step; else None.
        """
        replicas = replicas or Replicas(len(measurements.iso))
        shared = _Directions.of(measurements, features, replicas)
        if not shared.rows:
            return self
        measured = shared.own_share()
        if measured is None or self.measured is None:
            measured = self.measured if measured is None else measured
        else:
            measured = (1 - RATE) * self.measured + RATE * measured
        known = known or measurements.known
        after = replace(self, measured=measured)
        if len(self.gram):
            return after._from_all(measurements, features, shared, replicas, known)
        return after._from_latest(measurements, features, shared, replicas, known)

    def _from_all(
        self,
        measurements: Measurements,
        features: Features,
        shared: _Directions,
        replicas: Replicas,
        known: Basis,
    ) -> MeanJacobian:
        """By the normal equations of all rows so far."""
        prior = _mixed(known, FLAT if known is measurements.known else FIRST_FLAT)
        gram, moment = torch.zeros_like(self.gram), torch.zeros_like(self.moment)
        energy = gram.new_zeros(2)  # of isotropic rows, and what M leaves of it
        size = gram.new_zeros(())

        def add(z: Tensor, y: Tensor, count: Tensor | float = 1.0) -> None:
            weighted = z * (count / _variance(prior, z)).unsqueeze(1)
            gram.add_(z.T @ weighted)
            moment.add_(weighted.T @ y.to(z))
            size.add_(len(z))

        used = torch.nonzero(shared.often > 0).flatten()
        if len(used) and replicas.rank == 0:  # replicas know these together
            add(*shared.of_measured(measurements.known, used))
        if shared.predicted[replicas.rank]:
            add(*_predicted(measurements, features))
        for z, y in _isotropic(measurements, features):
            add(z, y)
            left = y - z @ self.values.T
            energy += torch.stack([y.square().sum(), left.square().sum()])
        if replicas.several:
            others = (moment, energy, size)
            (gram,), (moment, energy, size) = joint_symmetric([gram], others, replicas)
        # Few rows have to last longer, but not forever: the model changes.
        age = min(OLDEST, AGE ** min(1.0, float(size) / len(gram)))
        gram, moment = age * self.gram + gram, age * self.moment + moment
        own = self.measured
        if own is None:  # at most half of what M left
            own = min(OWN, float(energy[1] / energy[0].clamp(min=1e-30)) / 2)
        own = min(MOST_OWN, max(LEAST, own))
        ratio = own / (1 - own)
        rows = prior.rows(torch.arange(prior.size)).to(gram)
        inverse = (rows.T * (1 / prior.energy - 1 / prior.rest)) @ rows
        system = (gram + ratio * inverse).double()
        system.diagonal().add_(ratio / prior.rest)
        found = torch.cholesky_solve(moment.double(), torch.linalg.cholesky(system)).to(gram)
        return replace(self, values=found.T.contiguous(), gram=gram, moment=moment)

    def _from_latest(
        self,
        measurements: Measurements,
        features: Features,
        shared: _Directions,
        replicas: Replicas,
        known: Basis,
    ) -> MeanJacobian:
        """By the latest rows, as far as there is room."""
        mean, measured = self.values, self.measured
        new, isotropic = _rows(measurements, features, shared, replicas)
        most = _room(measurements.space)
        young = AGE * self.count > LEAST  # the others say nothing any more
        old = (self.z[young], self.y[young], AGE * self.count[young])
        z, y, count = (torch.cat([a, b])[:most] for a, b in zip(new, old, strict=True))
        residual = y - z @ mean.T
        # Half of the prior is flat: the first directions are wrong, and M is to be right anywhere.
        prior = _mixed(known, 0.5)
        e = prior.coordinates(z)
        kernel = (e * (prior.energy - prior.rest)) @ e.T + prior.rest * (z @ z.T)
        first = slice(len(new[0]) - isotropic, len(new[0]))
        whole, left = (float(x[first].double().square().sum()) for x in (y, residual))
        own = min(OWN * whole, left / 2) if measured is None else measured * whole
        ridge = own / max(left - own, LEAST * whole, 1e-300)
        diagonal = kernel.diagonal().clamp(min=LEAST * float(kernel.diagonal().mean()) + 1e-30)
        noise = min(MOST, max(LEAST, ridge)) * diagonal / count
        system = (kernel + torch.diag(noise)).double()
        alpha = torch.cholesky_solve(residual.double(), torch.linalg.cholesky(system)).to(z)
        weights = (alpha.T @ e) * (prior.energy - prior.rest)
        moved = prior.lift(weights) + prior.rest * (alpha.T @ z)
        return replace(self, values=mean + moved, z=z, y=y, count=count)


def _mixed(known: Basis, flat: float) -> Basis:
    """The basis with this share of its energy spread over all directions."""
    each, kept = flat / known.dimensions, 1 - flat
    return replace(known, energy=kept * known.energy + each, rest=kept * known.rest + each)


def _variance(prior: Basis, z: Tensor) -> Tensor:
    """z^T Lambda z of each row, above 0, shape (rows,)."""
    e = prior.coordinates(z)
    found = e.square() @ (prior.energy - prior.rest).to(z) + prior.rest * z.square().sum(1)
    return found.clamp(min=1e-30)  # rows of padding are 0


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
    def of(cls, measurements: Measurements, features: Features, replicas: Replicas) -> _Directions:
        """Sums over all points."""
        measured = measurements.measured
        c, live = features.c * measured.unsqueeze(2), int((measurements.iso > 0).sum())
        mine = [measured.sum(0).to(c), c.sum(0), c.square().sum(0), c.new_ones(1) * live]
        often, sums, squares, points = replicas.sum(mine)
        predicted = len(_predicted(measurements, features)[0])
        return cls(often, sums, squares, int(points), _counted(predicted, replicas))

    @property
    def rows(self) -> int:
        """Measured directions, predicted ones, and points with isotropic draws."""
        return int((self.often > 0).sum()) + sum(self.predicted) + self.live

    def of_measured(self, known: Basis, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """These directions, mean derivatives and numbers of points."""
        often = self.often[used]
        return known.rows(used).to(often), self.sums[used] / often.unsqueeze(1), often

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


def _predicted(measurements: Measurements, features: Features) -> tuple[Tensor, Tensor]:
    """Predicted directions that were measured, and their derivatives of the features."""
    u = measurements.predicted
    if u is None:
        return measurements.w.new_zeros(0, measurements.space.dimensions), features.a[:0]
    there = torch.nonzero(u.square().sum(1) > 0).flatten()
    return u[there], features.a[there]


def _isotropic(
    measurements: Measurements, features: Features, each: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Isotropic rows, at most ``each`` per point, and their derivatives of the features."""
    mask = measurements.space.mask
    for points, real, whole in measurements.blocks():
        n = real.size(1) if each is None else min(each, real.size(1))
        seen = whole[:, :n] if mask is None else whole[:, :n] * mask[points].unsqueeze(1)
        keep = real[:, :n]
        yield seen[keep], features.w[points, :n][keep]


def _rows(
    measurements: Measurements, features: Features, shared: _Directions, replicas: Replicas
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Noise, derivatives of the features and number of points of each row, on all replicas.

    Points that measured the same direction share a row. Also how many of the last rows are
    isotropic.
    """
    most = _room(measurements.space)
    half = most // 2  # at most: isotropic rows look everywhere
    used = torch.nonzero(shared.often > 0).flatten()[:half]
    measured = shared.of_measured(measurements.known, used)
    own = _predicted(measurements, features)
    predicted = _gathered(own, half - len(used), shared.predicted, replicas)
    room = most - len(used) - len(predicted[0])
    each = max(1, room // max(1, shared.live))
    none = (own[0][:0], features.w[0, :0])
    parts = zip(none, *_isotropic(measurements, features, each), strict=True)
    z, y = (torch.cat(part) for part in parts)
    isotropic = _gathered((z, y), room, _counted(len(z), replicas), replicas)
    z, y = (torch.cat(parts) for parts in zip(measured[:2], predicted, isotropic, strict=True))
    count = torch.cat([measured[2], z.new_ones(len(z) - len(used))])
    return (z, y, count), len(isotropic[0])


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
