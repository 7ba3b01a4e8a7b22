"""MeZO: memory-efficient zeroth-order fine-tuning, as a configuration of SPSA.

Malladi et al., "Fine-tuning language models with just forward passes", 2023. One Gaussian draw on
all parameters, shared by the batch; two queries; noise from a seed, made anew where it is needed.

What differs from the authors' loop: parameters are not restored by subtracting the noise again
(which drifts), but never written to; and the estimate is left in ``.grad``, so that any optimizer
can use it. Beyond that gradient, memory is that of inference plus the noise of one module.
"""

from __future__ import annotations

from torch import nn

from flops.engine.groups import Group
from flops.estimators.spsa import SPSA

QUERIES = 2


def mezo(model: nn.Module, sigma: float = 1e-3, queries: int = QUERIES) -> list[Group]:
    """The groups of MeZO: the whole model in one, shared draws, two queries.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point; more than two average several draws (n-SPSA in the paper).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    estimator = SPSA(sigma=sigma, shared=True)
    return [Group(parameters=parameters, estimator=estimator, queries=queries, name="mezo")]
