"""Axes of charts: ticks at round values, numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def short(value: float) -> str:
    """A number in few characters: 1200 is 1.2k, 0.00012 is 1.2e-4."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.3g}{name}"
    if size and size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels.

    Attributes:
        low: Smallest value.
        high: Largest value.
        start: Pixel of the smallest value.
        end: Pixel of the largest value.
        log: Whether it is logarithmic; values must then be positive.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of a value, which is clipped to the range."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """At most so many round values within the range, at least two if there are."""
        found = _log_ticks(self.low, self.high, most) if self.log else []
        return found if len(found) > 2 else self._linear_ticks(most)

    def _linear_ticks(self, most: int) -> list[float]:
        step = _round_step((self.high - self.low) / max(1, most - 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def fitted(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    zero: bool = False,
    room: float = 0.04,
) -> Scale:
    """A scale that holds all values, with some room.

    Args:
        values: Finite values; positive for a logarithmic scale.
        start: Pixel of the smallest value.
        end: Pixel of the largest value.
        log: Whether it is logarithmic.
        zero: Begin at 0.
        room: Share of the range that is added on both sides.
    """
    if not values:
        return Scale(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    low, high = min(values), max(values)
    if log:
        factor = max((high / low) ** room, 1.05)
        return Scale(low / factor, high * factor, start, end, log)
    if zero:
        low = min(0.0, low)
    gap = (high - low) or abs(high) or 1.0
    return Scale(low if zero else low - room * gap, high + room * gap, start, end)


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]
