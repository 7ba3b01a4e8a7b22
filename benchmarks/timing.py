"""Interleaved timing, so that other load affects all cases equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def interleaved(
    runs: Mapping[str, Callable[[], Any]], repeats: int, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of each case, once per repeat, in rotating order. Warm-ups are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(warm + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            runs[name]()
            if repeat >= warm:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and half the interquartile range, robust to single disturbed repeats."""
    if len(values) < 2:
        return statistics.median(values), 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratio per repeat."""
    return [a / b for a, b in zip(over, under, strict=True)]
