"""Gradient estimators: one file each, named and documented as in the paper."""

from flops.estimators.base import Binding, Estimator
from flops.estimators.deepzero import DeepZero
from flops.estimators.es import ES
from flops.estimators.exact import Exact
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.estimators.mezo import mezo
from flops.estimators.spsa import SPSA

__all__ = ["ES", "SPSA", "Binding", "DeepZero", "Estimator", "Exact", "LikelihoodRatio", "mezo"]
