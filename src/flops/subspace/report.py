"""Results of shaped noise: error of the estimate, and the share that its directions explain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SiteReport:
    """Shaped noise at one site.

    Attributes:
        site: Name of the perturbed module or parameter.
        k: Measured directions per point at this site, averaged over the points.
        explained_variance: Held-out estimate of the share of the gradient's energy in these
            directions, over the last steps; 0 before the first shaped step.
    """

    site: str
    k: float
    explained_variance: float


@dataclass(frozen=True)
class ShapingReport:
    """Shaped noise in one group.

    Attributes:
        k: Measured directions per point, averaged over the points.
        explained_variance: Held-out estimate of the share of the gradient's energy that was
            measured.
        explore: Share of isotropic queries.
        correction: Weight of the unbiased correction, between 0 and 1.
        sites: Reports by site.
        predicted: Share of the points that also measured the gradient predicted by the mean
            Jacobian (`flops.subspace.mean_jacobian`).
        reliability: Expected cosine of a point's estimate to its gradient, from held-out queries.
            NaN in a first step that shows its own directions.
        withheld: Whether the group is too unreliable, and ``.grad`` was left as it was.
    """

    k: float
    explained_variance: float
    explore: float
    correction: float
    sites: tuple[SiteReport, ...]
    predicted: float = 0.0
    reliability: float = 0.0
    withheld: bool = False


@dataclass(frozen=True)
class ShapedEstimate:
    """Energy and error of each point's delta.

    Attributes:
        energy: Estimated squared norm of the gradient at the noise, shape (B,).
        error: Estimated squared error of its estimate, shape (B,).
        dimensions: Noise values of a row.
        report: Summary.
        left: Expected error over energy with 0, 1, 2, ... queries per point.
    """

    energy: Tensor
    error: Tensor
    dimensions: int
    report: ShapingReport
    left: tuple[float, ...] = ()
