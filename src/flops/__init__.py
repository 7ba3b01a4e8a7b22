"""FLOPS: train neural networks with forward passes only.

fg = ForwardGradient(model, loss_fn)
report = fg.estimate(x, y)      # instead of loss.backward()
optimizer.step()
"""

from flops import losses, optim, presets
from flops.diagnostics.diagnose import Diagnosis, diagnose
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.engine.report import StepReport
from flops.errors import (
    BackwardError,
    BatchError,
    CoverageError,
    FlopsError,
    NonFiniteLossError,
    PrecisionWarning,
    QueryError,
    RandomnessError,
)
from flops.estimators import ES, FZOO, JVP, LOZO, SPSA, DeepZero, Exact, LikelihoodRatio, MeZO
from flops.passes.batch import Shared
from flops.subspace.config import Shaping
from flops.version import __version__ as __version__

__all__ = [
    "ES",
    "FZOO",
    "JVP",
    "LOZO",
    "SPSA",
    "BackwardError",
    "BatchError",
    "CoverageError",
    "DeepZero",
    "Diagnosis",
    "Exact",
    "FlopsError",
    "ForwardGradient",
    "Group",
    "LikelihoodRatio",
    "MeZO",
    "NonFiniteLossError",
    "PrecisionWarning",
    "QueryError",
    "RandomnessError",
    "Shaping",
    "Shared",
    "StepReport",
    "diagnose",
    "losses",
    "optim",
    "presets",
]
