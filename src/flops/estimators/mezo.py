"""MeZO: memory-efficient zeroth-order fine-tuning.

Malladi et al., "Fine-tuning language models with just forward passes", 2023. One Gaussian draw on
all parameters, shared by the batch; two queries; noise is regenerated from its seed.

Unlike in the authors' loop, parameters are never modified, instead of restored by subtracting the
noise (which drifts), and any optimizer can use the estimate in ``.grad``. Besides that gradient,
memory is that of inference and a perturbed copy of one module. The authors' update, in place and
without a gradient, is `flops.optim.ZerothOrderSGD`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flops.estimators.spsa import SPSA
from flops.subspace.config import Shaping

QUERIES = 2


@dataclass(frozen=True)
class MeZO(SPSA):
    """SPSA with shared draws; `Group(model, MeZO(), queries=2)` is the authors' method.

    More queries average several draws (n-SPSA, in the paper behind this library).

    Args:
        sigma: Noise scale (the authors' epsilon).
        noise: "gaussian" or "rademacher".
    """

    shared: bool = field(default=True, init=False, repr=False)
    shaping: Shaping | None = field(default=None, init=False, repr=False)
