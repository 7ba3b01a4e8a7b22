"""Learning: the second moments of gradients after a step, from losses or from all outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.basis import Change, JointChange, Moments, joint_changes
from flops.subspace.measurements import Features, Measurements
from flops.subspace.regression import Regression

ROOM = 1 << 22  # values of all gradients that the moments learn from, if there are several a point


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
    if replicas is not None:
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
    changes = []
    for s, (m, g) in enumerate(zip(moments, space.grids, strict=True)):
        mine = torch.nonzero(known.site == s).flatten()
        used = torch.full_like(floor, g.positions)
        if not g.aligned and space.mask is not None:
            used = g.cut(space.mask)[:, :, 0].sum(1).to(floor)[seen.point]
        over_channels = _change(
            g.cut(plus).flatten(0, 1),
            g.cut(minus).flatten(0, 1),
            float((floor * used).sum()),
            known.channels[s],
            known.column[mine],
            cover[mine],
        )
        if m.positions is not None:
            over_positions = _change(
                g.cut(plus).transpose(1, 2).flatten(0, 1),
                g.cut(minus).transpose(1, 2).flatten(0, 1),
                float(floor.sum()) * g.channels,
                known.positions[s],
                known.row[mine],
                cover[mine],
            )
            changes.append(over_positions)
        changes.append(over_channels)
    return changes


def _change(
    plus: Tensor, minus: Tensor, floor: float, vectors: Tensor, number: Tensor, cover: Tensor
) -> Change:
    summed = plus.new_zeros(vectors.size(1)).index_add_(0, number, cover)
    return Change(plus, minus, floor, vectors, summed)
