"""FLOPS: train neural networks with forward passes only.

fg = ForwardGradient(model, loss_fn)
report = fg.estimate(x, y)      # in place of loss.backward()
optimizer.step()
"""

from flops.batch import Shared
from flops.diagnostics import Diagnosis, diagnose
from flops.engine import ForwardGradient
from flops.errors import (
    BatchError,
    CoverageError,
    FlopsError,
    NonFiniteLossError,
    PrecisionWarning,
    QueryError,
    RandomnessError,
)
from flops.estimators import ES, SPSA, DeepZero, Exact, LikelihoodRatio, mezo
from flops.groups import Group
from flops.shaping import Shaping
from flops.step_report import StepReport

__version__ = "0.1.0"

__all__ = [
    "ES",
    "SPSA",
    "BatchError",
    "CoverageError",
    "DeepZero",
    "Diagnosis",
    "Exact",
    "FlopsError",
    "ForwardGradient",
    "Group",
    "LikelihoodRatio",
    "NonFiniteLossError",
    "PrecisionWarning",
    "QueryError",
    "RandomnessError",
    "Shaping",
    "Shared",
    "StepReport",
    "diagnose",
    "mezo",
]
