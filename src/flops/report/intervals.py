"""Means over seeds with their 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # scipy.stats would take a second to import


@dataclass(frozen=True)
class Interval:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        half: Half the width of its interval; infinite for one value.
        spread: Standard deviation over the values; 0 for one.
        count: Number of values.
    """

    mean: float
    half: float
    spread: float
    count: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def shown(self, digits: int = 3, sign: bool = False) -> str:
        """Mean ± half the width, or only the mean if there is no width."""
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if math.isinf(self.half) else f"{mean} ± {self.half:.{digits}f}"


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean with its t-interval: mean ± t_{n-1} s / sqrt(n).

    Raises:
        ValueError: If there is no value.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, math.inf, 0.0, 1)
    spread = statistics.stdev(values)
    return Interval(mean, t_quantile(count - 1, level) * spread / math.sqrt(count), spread, count)


def paired(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of the paired differences first - second."""
    return interval([a - b for a, b in zip(first, second, strict=True)], level)


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = level, for Student's T."""
    return float(stdtrit(freedom, (1 + level) / 2))
