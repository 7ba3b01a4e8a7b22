r"""A low-rank prior of the Jacobian of the outputs, shared by all points.

Row c of a point's Jacobian J is the gradient of its output c. Its prior is

    J_c ~ N(0, e (U U^T + s I) / K),

with a low-rank factor U shared by all points, an isotropic floor s, the point's energy e and the
number of outputs K. A directional derivative along noise z is <J_c, z> plus an error that grows
with its age, since the parameters have moved. Given the derivatives y of a point along its noise
Z (n x d), the posterior mean of J_c is

    (U U^T + s I) Z^T alpha / K,   alpha = S^-1 y,   S = (Z U U^T Z^T + s Z Z^T + N) / K,

with N the diagonal matrix of error variances. U is fitted to all stored derivatives by expectation
maximisation: the posterior mean and covariance of every point's coordinates along U, then the U
that explains the derivatives best, by a few steps of conjugate gradients. No d x d matrix is
formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.perturb.random import generator

RANK = 16  # columns of U
ROUNDS, STEPS = 2, 4  # of expectation maximisation, and of conjugate gradients in each
ERROR = 0.01  # variance of a derivative over its mean square: curvature and rounding
LEAST = 0.02  # lower bound of s: share of the energy outside U
DRIFTS = (1e-4, 0.3)  # bounds of the error per squared step of age


@dataclass(frozen=True)
class Measured:
    """Directional derivatives of points, padded with zeros to the longest.

    Attributes:
        noise: Directions, shape (P, n, d).
        derivatives: Of each output, divided by the root of the point's energy, shape (P, n, K).
        age: Age of each in steps, shape (P, n).
        real: False for padding, shape (P, n).
        products: Z Z^T, shape (P, n, n).
    """

    noise: Tensor
    derivatives: Tensor
    age: Tensor
    real: Tensor
    products: Tensor

    def at(self, points: Tensor) -> Measured:
        """The derivatives of some points."""
        return Measured(*(value[points] for value in vars(self).values()))

    def errors(self, drift: float) -> Tensor:
        """Variance of each derivative at unit energy, 1 in the padding."""
        return torch.where(self.real, ERROR + drift * self.age.square(), 1.0)


@dataclass(frozen=True)
class Fit:
    """Posterior weights: alpha and S^-1, shapes (P, n, K) and (P, n, n)."""

    alpha: Tensor
    inverse: Tensor

    @property
    def held_out(self) -> Tensor:
        """Leave-one-out residual of each derivative, shape (P, n, K)."""
        return self.alpha / self.inverse.diagonal(dim1=1, dim2=2).unsqueeze(2)


@dataclass(frozen=True)
class Factors:
    """The prior.

    Attributes:
        directions: U, shape (d, r).
        floor: s.
        drift: Variance of a derivative's error per squared step of age, at unit energy.
    """

    directions: Tensor
    floor: float
    drift: float

    @classmethod
    def unknown(cls, dimensions: int, seed: int) -> Factors:
        """An almost isotropic prior: U starts as a small random matrix."""
        rank = min(RANK, dimensions)
        source = generator(seed, 19)
        directions = torch.randn(dimensions, rank, generator=source) * (0.3 / dimensions**0.5)
        return cls(directions, 1 / dimensions, 0.01)

    @classmethod
    def from_memory(cls, kept: Mapping[str, Any] | None, dimensions: int, seed: int) -> Factors:
        """Restore from `vars`."""
        if kept is None:
            return cls.unknown(dimensions, seed)
        return cls(kept["directions"], float(kept["floor"]), float(kept["drift"]))

    def times(self, rows: Tensor) -> Tensor:
        """(U U^T + s I) times rows, shape (..., d)."""
        return rows @ self.directions @ self.directions.T + self.floor * rows

    def fit(self, seen: Measured) -> Fit:
        """Posterior weights of the points' derivatives."""
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self._system(seen)))
        alpha = inverse @ seen.derivatives.double()
        return Fit(alpha.to(seen.derivatives), inverse.to(seen.derivatives))

    def learned(self, seen: Measured, now: Tensor) -> Factors:
        """The prior after an update on all stored derivatives.

        Args:
            seen: Stored derivatives.
            now: Positions in ``seen`` of the points of this step.
        """
        latest, (low, high), found = seen.at(now), DRIFTS, self
        if bool((latest.age > 0).any()):
            drifts = (self.drift, max(low, self.drift / 2), min(high, self.drift * 2))
            found = min((replace(self, drift=d) for d in drifts), key=lambda f: f.missed(latest))
        for _ in range(ROUNDS):
            found = replace(found, directions=found._maximised(seen))
            share = min(1.0, max(LEAST, found.missed(latest)))
            found = replace(found, floor=share / seen.noise.size(2))
        return found

    def _system(self, seen: Measured) -> Tensor:
        """S of every point; the identity in the padding."""
        along = seen.noise @ self.directions
        system = along @ along.transpose(1, 2) + self.floor * seen.products
        return (
            system + torch.diag_embed(seen.errors(self.drift))
        ).double() / seen.derivatives.size(2)

    def _maximised(self, seen: Measured) -> Tensor:
        """U after one iteration of expectation maximisation."""
        rank, outputs = self.directions.size(1), seen.derivatives.size(2)
        along = seen.noise @ self.directions / outputs  # covariance of derivatives and coordinates
        fit = self.fit(seen)
        mean = along.transpose(1, 2) @ fit.alpha  # (P, r, K)
        spread = torch.eye(rank) / outputs - along.transpose(1, 2) @ fit.inverse @ along
        second = mean @ mean.transpose(1, 2) + outputs * spread
        weight = seen.real / (seen.errors(self.drift) + self.floor * seen.noise.size(2))
        weighted = weight.unsqueeze(2)

        def spread_back(rows: Tensor) -> Tensor:
            """Sum over points and derivatives of z times its row, shape (d, r)."""
            return seen.noise.flatten(0, 1).T @ (weighted * rows).flatten(0, 1)

        def normal(directions: Tensor) -> Tensor:
            return spread_back(seen.noise @ directions @ second) + 1e-6 * directions

        target = spread_back(seen.derivatives @ mean.transpose(1, 2))
        found = self.directions
        residual = target - normal(found)
        way, size = residual, residual.square().sum()
        for _ in range(STEPS):
            if float(size) <= 0:
                break
            image = normal(way)
            length = size / (way * image).sum()
            found, residual = found + length * way, residual - length * image
            size, before = residual.square().sum(), size
            way = residual + size / before * way
        return found

    def missed(self, seen: Measured) -> float:
        """Fraction of the variance of this step's derivatives that the others do not explain."""
        fresh = (seen.real & (seen.age == 0)).unsqueeze(2)
        left = (self.fit(seen).held_out * fresh).square().sum()
        return float(left / (seen.derivatives * fresh).square().sum().clamp(min=1e-30))
