"""Groups of whole methods, for `ForwardGradient(model, loss_fn, groups)`.

`paper` is the paper's likelihood ratio, for `Gaussian` or another allocator. The others are those
of their authors: all parameters in one group, with draws that the batch shares; a tied parameter
has the same noise in all its uses.
"""

from __future__ import annotations

from torch import nn

from flops.engine.auto_groups import automatic_groups
from flops.engine.groups import Group
from flops.estimators import fzoo as _fzoo
from flops.estimators import jvp as _jvp
from flops.estimators import lozo as _lozo
from flops.estimators import mezo as _mezo
from flops.estimators.base import Estimator
from flops.estimators.likelihood_ratio import LikelihoodRatio


def paper(model: nn.Module, sigma: float = 1e-3, queries: float = 20) -> list[Group]:
    """Likelihood ratio with isotropic noise on all leaves, in three groups of the layers.

    Args:
        model: The model to train.
        sigma: Noise scale.
        queries: Mean queries per point and group.
    """
    return automatic_groups(
        dict(model.named_modules()), LikelihoodRatio(sigma, targets="leaf"), queries
    )


def mezo(model: nn.Module, sigma: float = 1e-3, queries: int = _mezo.QUERIES) -> list[Group]:
    """MeZO: two queries.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point; more than two average several draws.
    """
    return _whole(model, _mezo.MeZO(sigma), queries, "mezo")


def fzoo(model: nn.Module, sigma: float = 1e-3, queries: int = _fzoo.QUERIES) -> list[Group]:
    """FZOO: eight queries beside the clean pass.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point (the authors' N), at least two.
    """
    return _whole(model, _fzoo.FZOO(sigma), queries, "fzoo")


def lozo(
    model: nn.Module,
    sigma: float = 1e-3,
    queries: int = _lozo.QUERIES,
    *,
    rank: int = 2,
    interval: int = 50,
) -> list[Group]:
    """LOZO: two queries.

    Args:
        model: The model to train.
        sigma: Noise scale (the authors' epsilon).
        queries: Queries per point; more than two average several draws.
        rank: Of the noise on a matrix.
        interval: Steps that stay in one subspace.
    """
    return _whole(model, _lozo.LOZO(sigma, rank, interval), queries, "lozo")


def jvp(model: nn.Module, queries: int = _jvp.QUERIES) -> list[Group]:
    """Forward gradient: one direction.

    Args:
        model: The model to train.
        queries: Directions, each charged as three forward passes.
    """
    return _whole(model, _jvp.JVP(), queries, "jvp")


def _whole(model: nn.Module, estimator: Estimator, queries: int, name: str) -> list[Group]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [Group(parameters=parameters, estimator=estimator, queries=queries, name=name)]
