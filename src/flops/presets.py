"""Groups that go together: whole methods by one word."""

from __future__ import annotations

from torch import nn

from flops.engine.groups import Group
from flops.estimators.mezo import QUERIES, MeZO


def mezo(model: nn.Module, sigma: float = 1e-3, queries: int = QUERIES) -> list[Group]:
    """MeZO: all parameters in one group, one draw for the batch, two queries.

    A tied parameter has one draw wherever it is used.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point; more than two average several draws.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    estimator = MeZO(sigma=sigma)
    return [Group(parameters=parameters, estimator=estimator, queries=queries, name="mezo")]
