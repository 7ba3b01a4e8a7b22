"""Gradient estimators: one file each, named and documented as in the paper."""

from flops.estimators.base import Estimation, Estimator
from flops.estimators.deepzero import DeepZero
from flops.estimators.es import ES
from flops.estimators.exact import Exact
from flops.estimators.fzoo import FZOO
from flops.estimators.jvp import JVP
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.estimators.lozo import LOZO
from flops.estimators.mezo import MeZO
from flops.estimators.spsa import SPSA
from flops.passes.binding import Binding

__all__ = [
    "ES",
    "FZOO",
    "JVP",
    "LOZO",
    "SPSA",
    "Binding",
    "DeepZero",
    "Estimation",
    "Estimator",
    "Exact",
    "LikelihoodRatio",
    "MeZO",
]
