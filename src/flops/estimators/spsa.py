"""Simultaneous perturbation stochastic approximation (SPSA): antithetic noise on the parameters.

Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient
approximation", 1992; the paper's equation 3, with z / (2 sigma^2) for z ~ N(0, sigma^2 I).
"""

from __future__ import annotations

from dataclasses import dataclass

from flops.estimators.parameter_noise import Baseline, ParameterNoise
from flops.perturb.random import Kind


@dataclass(frozen=True)
class SPSA(ParameterNoise):
    """g = mean over draws of (l(theta + z) - l(theta - z)) z / (2 sigma^2); two queries per draw.

    With ``shared=False`` and n queries per point this is n-SPSA with per-point draws; with
    ``shared=True`` and two queries it is MeZO.

    Args:
        sigma: Noise scale.
        shared: One draw for the whole batch instead of per-point draws.
        noise: Noise of shared draws.
        shaping: `Shaping()` concentrates noise in the learned subspace; None is isotropic. The
            isotropic ones among shaped draws are signs.
    """

    @property
    def used_baseline(self) -> Baseline:
        """Antithetic pairs."""
        return "antithetic"

    @property
    def _isotropic(self) -> Kind:
        return "rademacher"
