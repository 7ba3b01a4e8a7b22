"""MeZO: memory-efficient zeroth-order fine-tuning.

Malladi et al., "Fine-tuning language models with just forward passes", 2023. One Gaussian draw on
all parameters, shared by the batch; two queries; noise from a seed, made anew where it is needed.

What differs from the authors' loop: parameters are not restored by subtracting the noise again
(which drifts), but never written to; and any optimizer can use the estimate in ``.grad``. Beyond
that gradient, memory is that of inference and a perturbed copy of one module. The authors' own
update, in place and without a gradient, is `flops.optim.ZerothOrderSGD`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flops.estimators.spsa import SPSA
from flops.subspace.config import Shaping

QUERIES = 2


@dataclass(frozen=True)
class MeZO(SPSA):
    """SPSA with draws that the batch shares; `Group(model, MeZO(), queries=2)` is the authors'.

    More queries average several draws, which the paper behind this library calls n-SPSA.

    Args:
        sigma: Noise scale (the authors' epsilon).
        noise: "gaussian" or "rademacher".
    """

    shared: bool = field(default=True, init=False, repr=False)
    shaping: Shaping | None = field(default=None, init=False, repr=False)
