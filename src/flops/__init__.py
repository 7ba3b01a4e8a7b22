"""FLOPS: train neural networks with forward passes only.

fg = ForwardGradient(model, loss_fn)
report = fg.estimate(x, y)      # instead of loss.backward()
optimizer.step()
"""

import importlib
from typing import TYPE_CHECKING, Any

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
from flops.version import __version__ as __version__

if TYPE_CHECKING:
    from flops import losses, optim, presets
    from flops.diagnostics.diagnose import Diagnosis, diagnose
    from flops.engine.forward_gradient import ForwardGradient
    from flops.engine.groups import Group
    from flops.engine.report import StepReport
    from flops.estimators import ES, FZOO, JVP, LOZO, SPSA, DeepZero, Exact, LikelihoodRatio, MeZO
    from flops.passes.batch import Shared
    from flops.subspace.config import Shaping

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

# Imported when they are used: the command line names a wrong address before it imports torch.
_HOMES = {
    "Diagnosis": "flops.diagnostics.diagnose",
    "diagnose": "flops.diagnostics.diagnose",
    "ForwardGradient": "flops.engine.forward_gradient",
    "Group": "flops.engine.groups",
    "StepReport": "flops.engine.report",
    "Shared": "flops.passes.batch",
    "Shaping": "flops.subspace.config",
    **dict.fromkeys(
        ("ES", "FZOO", "JVP", "LOZO", "SPSA", "DeepZero", "Exact", "LikelihoodRatio", "MeZO"),
        "flops.estimators",
    ),
}
_MODULES = (
    "allocators",
    "diagnostics",
    "engine",
    "estimators",
    "losses",
    "optim",
    "passes",
    "perturb",
    "presets",
    "subspace",
)

if not TYPE_CHECKING:  # type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
