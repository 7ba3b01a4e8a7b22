"""Sums over the points of a step of shaped noise, to which all replicas add theirs.

Everything that a group learns of a step, besides the second moments and the mean Jacobian, follows
from these: explained variance, ridge, share of signal, reliability and the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace.measurements import Measurements
from flops.subspace.regression import Regression

AHEAD = 256  # directions whose expected energies are averaged over all points


@dataclass(frozen=True)
class StepSums:
    """Sums over points, in double precision unless noted.

    Attributes:
        fit: Energy and unexplained energy; their squares and product, shape (5,).
        errors: Squared error of the posterior mean, of its correction, and of isotropic estimates,
            shape (3,).
        scores: Squared held-out residuals with each ridge, shape (3,).
        sites: Measured directions, measured and unexplained energy of each site, shape (sites, 3).
        counts: Points, draws, isotropic draws and predicted directions, shape (4,).
        expected: Share of energy that predicted directions are expected to hold, shape (1,).
        prior: Expected energy of the first directions, shape (AHEAD,).
        correction: The correction, shape (values,), in the precision of the step.
    """

    fit: Tensor
    errors: Tensor
    scores: Tensor
    sites: Tensor
    counts: Tensor
    expected: Tensor
    prior: Tensor
    correction: Tensor

    @classmethod
    def of(cls, measurements: Measurements, found: Regression, expected: float = 0.0) -> StepSums:
        """Sums over these points.

        Args:
            measurements: The measurements.
            found: Their regression.
            expected: Mean share of energy in the predicted directions (`Design.expected`).
        """
        space, size = measurements.space, len(measurements.iso)
        energy, missed = found.energy.double(), found.missed.double()
        drawn = measurements.draws.clamp(min=1).to(found.missed)
        n, sites = measurements.iso.clamp(min=1).to(found.missed), []
        for s, g in enumerate(space.grids):
            square = g.cut(found.outside).square().sum((1, 2)) - found.missed * g.size / n
            mine = measurements.measured[:, measurements.known.site == s]
            inside = g.cut(found.inside).square().sum()
            sites += [mine.sum(), inside, (square * n / (n + 1)).sum()]
        u, some = measurements.predicted, measurements.prior[:, :AHEAD].double().cpu()
        predicted = 0 if u is None else int(u.any(1).sum())
        counts = [size, int(measurements.draws.sum()), int(measurements.iso.sum()), predicted]
        prior, scores = torch.zeros(AHEAD, dtype=torch.float64), torch.zeros(3).double()
        prior[: some.size(1)] = some.mean(0) * size
        scores[: len(found.scores)] = torch.tensor(found.scores).double()
        return cls(
            _sums(energy, missed, energy.square(), missed.square(), energy * missed),
            _sums(
                found.error,
                correction_noise(measurements, found),
                found.energy * space.dimensions / drawn,
            ),
            scores,
            _sums(*sites).view(-1, 3),
            torch.tensor(counts, dtype=torch.float64),
            torch.tensor([expected * size], dtype=torch.float64),
            prior,
            found.correction.sum(0),
        )

    def joined(self, replicas: Replicas, measurements: Measurements) -> StepSums:
        """Sums over the points of all replicas, in one message for each precision.

        Where the numbers of positions differ, the correction is that of the first ones.

        Args:
            replicas: The replicas.
            measurements: Measurements of this one.
        """
        if not replicas.several:
            return self
        grids, row = measurements.space.grids, self.correction.unsqueeze(0)
        lengths = replicas.max(torch.tensor([float(g.positions) for g in grids])).tolist()
        padded = [
            F.pad(g.cut(row)[0], (0, 0, 0, int(most) - g.positions)).flatten()
            for g, most in zip(grids, lengths, strict=True)
        ]
        own = [getattr(self, f.name) for f in fields(self)[:-1]]
        return StepSums(*replicas.sum([*own, torch.cat(padded)]))

    @property
    def points(self) -> float:
        """Number of points."""
        return float(self.counts[0])


def correction_noise(measurements: Measurements, found: Regression) -> Tensor:
    """Noise of each point's correction: its expected squared norm, shape (B,)."""
    noise = found.error * measurements.space.dimensions
    noise = noise / measurements.fitted.clamp(min=1).to(noise)
    return torch.where((measurements.iso > 0).to(noise.device), noise, 0.0)


def _sums(*parts: Tensor) -> Tensor:
    return torch.stack([part.double().sum().cpu() for part in parts])


def coherence(sums: StepSums) -> tuple[float, float]:
    """Squared norm of the batch's summed correction, and its part due to noise."""
    return float(sums.correction.square().sum()), float(sums.errors[1])


def explained_variance(sums: StepSums) -> tuple[float, float]:
    """Measured share of the energy, and its standard error over the points."""
    whole, left, squares, left_squares, product = sums.fit.tolist()
    missed = left / whole
    error = left_squares - 2 * missed * product + missed**2 * squares
    return 1 - missed, max(0.0, error) ** 0.5 / whole


def explained_by_site(sums: StepSums) -> list[float]:
    """Measured share of each site's energy in this step.

    Residuals do not distinguish the sites, so their total is split in proportion to the energies of
    the isotropic estimates, minus their noise.
    """
    _, measured, missed = sums.sites.unbind(1)
    left = [max(1e-300, x) for x in missed.tolist()]
    scale = float(sums.fit[1]) / sum(left)
    pairs: Sequence[tuple[float, float]] = list(zip(measured.tolist(), left, strict=True))
    return [a / max(a + b * scale, 1e-300) for a, b in pairs]
