"""Errors and warnings.

Every error here is raised before parameters or ``.grad`` are changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class FlopsError(Exception):
    """Base class of all errors of this library."""


class CoverageError(FlopsError, ValueError):
    """Groups, targets and parameters do not fit together."""


class RandomnessError(FlopsError, RuntimeError):
    """The forward pass is random, so two queries differ by more than the noise."""


class BatchError(FlopsError, ValueError):
    """Inputs, targets or losses do not have the shape of a batch of independent points."""


class NonFiniteLossError(FlopsError, ArithmeticError):
    """A clean or perturbed loss is NaN or infinite."""


class QueryError(FlopsError, ValueError):
    """The query budget does not fit the estimator or the allocator."""


class BackwardError(FlopsError, RuntimeError):
    """A derivative was asked for through a part of the model that has no backward pass."""


class PrecisionWarning(UserWarning):
    """Loss differences are so small that rounding dominates the directional derivatives."""


def check_least(least: Mapping[str, float], given: object) -> None:
    """Check options of a command, attributes of ``given``; None is allowed.

    Raises:
        FlopsError: Names the first that is below its bound, or no finite number.
    """
    for name, bound in least.items():
        value = getattr(given, name)
        if value is not None and not bound <= value < math.inf:
            option = "--" + name.replace("_", "-")
            raise FlopsError(f"{option} must be at least {bound:g}, not {value}")
