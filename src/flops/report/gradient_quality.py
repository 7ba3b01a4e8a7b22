"""Charts of the quality of a run's gradient estimates by group, over its steps."""

from __future__ import annotations

import math
from typing import Any

from flops.report.run_record import RunRecord
from flops.report.svg import Chart, Curve

FLOOR, CEILING = 1e-3, 1e6  # of the signal-to-noise ratio on a logarithmic axis
SMOOTH = 0.05  # share of the run over which values are averaged


def quality_charts(run: RunRecord) -> list[str]:
    """Cosine, expected cosine, explained variance and signal-to-noise ratio, as far as recorded."""
    found = [
        Chart(
            "Cosine to the backpropagated gradient",
            "step",
            "cosine",
            _curves(run, lambda line: line.get("cosine"), smooth=False),
            limits=(-0.1, 1.0),
            note="Measured every cosine_steps steps; 1 is the exact gradient.",
        ),
        Chart(
            "Expected cosine of a point's estimate",
            "step",
            "expected cosine",
            _curves(run, lambda line: _shaping(line, "reliability")),
            limits=(0.0, 1.0),
            note="Of shaped noise, from held-out queries.",
        ),
        Chart(
            "Explained variance of shaped noise",
            "step",
            "explained variance",
            _curves(run, lambda line: _shaping(line, "explained_variance")),
            limits=(0.0, 1.0),
            note="Share of the gradient's energy in the measured directions, held out.",
        ),
        Chart(
            "Signal-to-noise ratio of the estimate",
            "step",
            "signal-to-noise ratio",
            _curves(run, lambda line: line.get("snr"), clip=True),
            log_y=True,
            note=f"Shown between {FLOOR:g} and {CEILING:.0e}; below 1 noise dominates a step.",
        ),
    ]
    return [html for chart in found if chart.curves and (html := chart.html())]


def _shaping(line: dict[str, Any], name: str) -> dict[str, Any]:
    shaping = line.get("shaping")
    if not isinstance(shaping, dict):
        return {}
    return {n: s[name] for n, s in shaping.items() if isinstance(s, dict) and name in s}


def _curves(run: RunRecord, values: Any, clip: bool = False, smooth: bool = True) -> list[Curve]:
    """One curve a group; steps without a value are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in run.steps:
        groups = values(line)
        for group, value in groups.items() if isinstance(groups, dict) else ():
            if isinstance(value, int | float) and math.isfinite(value):
                shown = min(max(value, FLOOR), CEILING) if clip else value
                found.setdefault(str(group), []).append((float(line["step"]), float(shown)))
    width = max(1, round(SMOOTH * len(run.steps))) if smooth else 1
    return [
        Curve(group, running_mean(points, width, clip), number)
        for number, (group, points) in enumerate(found.items())
    ]


def running_mean(
    points: list[tuple[float, float]], width: int, logarithmic: bool = False
) -> list[tuple[float, float]]:
    """Mean over the last points, of the logarithms if asked."""
    shown = []
    for end in range(1, len(points) + 1):
        part = [y for _, y in points[max(0, end - width) : end]]
        mean = (
            math.exp(sum(map(math.log, part)) / len(part)) if logarithmic else sum(part) / len(part)
        )
        shown.append((points[end - 1][0], mean))
    return shown
