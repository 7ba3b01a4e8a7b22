"""Groups of whole methods."""

from __future__ import annotations

from torch import nn

from flops.engine.groups import Group
from flops.estimators.mezo import QUERIES, MeZO


def mezo(model: nn.Module, sigma: float = 1e-3, queries: int = QUERIES) -> list[Group]:
    """MeZO: all parameters in one group, shared draws, two queries.

    A tied parameter has the same noise in all its uses.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point; more than two average several draws.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    estimator = MeZO(sigma=sigma)
    return [Group(parameters=parameters, estimator=estimator, queries=queries, name="mezo")]
