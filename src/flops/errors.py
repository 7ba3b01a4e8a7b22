"""What can go wrong, said so that the reader knows what to change.

Every error here is raised before parameters or ``.grad`` have been changed.
"""

from __future__ import annotations


class FlopsError(Exception):
    """Base of all errors that this library raises on purpose."""


class CoverageError(FlopsError, ValueError):
    """Groups, targets and parameters do not fit together."""


class RandomnessError(FlopsError, RuntimeError):
    """The forward pass draws random numbers, so two queries differ by more than the noise."""


class BatchError(FlopsError, ValueError):
    """Inputs, targets or losses do not have the shape of a batch of independent points."""


class NonFiniteLossError(FlopsError, ArithmeticError):
    """A clean or perturbed loss is NaN or infinite."""


class QueryError(FlopsError, ValueError):
    """The query budget does not fit the estimator or the allocator."""


class PrecisionWarning(UserWarning):
    """Loss differences are so small that floating-point rounding dominates the slopes."""
