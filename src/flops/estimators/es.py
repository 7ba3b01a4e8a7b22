"""Evolution strategies (ES): one-sided noise on the parameters.

Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017;
the paper's equation 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from flops.estimators.parameter_noise import Baseline, ParameterNoise


@dataclass(frozen=True)
class ES(ParameterNoise):
    """g = mean over draws of (l(theta + z) - b) z / sigma^2; one query per draw.

    Args:
        sigma: Noise scale.
        shared: One draw for the whole batch instead of per-point draws.
        noise: Noise of shared draws, and of the isotropic ones among shaped draws.
        baseline: "clean" (the noise-free loss), "none", or "antithetic", which is SPSA.
        shaping: `Shaping()` concentrates noise in the learned subspace; None is isotropic.
    """

    baseline: Baseline = "clean"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.baseline not in get_args(Baseline):
            raise ValueError(f"'{self.baseline}' is not one of {list(get_args(Baseline))}")
        if self.shaping is not None and self.baseline == "none":
            raise ValueError(
                'shaping needs directional derivatives: use baseline="clean" or "antithetic"'
            )

    @property
    def used_baseline(self) -> Baseline:
        """The given baseline."""
        return self.baseline
