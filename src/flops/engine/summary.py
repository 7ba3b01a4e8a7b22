"""Summary for `print(fg)`: the groups, and the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence

from flops.engine.groups import ResolvedGroup
from flops.engine.layout import Layout
from flops.estimators.exact import BACKWARD

HEADERS = ("group", "targets", "parameters", "noise", "estimator", "queries", "query cost")
UNKNOWN = "?"


def summary(groups: Sequence[ResolvedGroup], layout: Layout | None) -> str:
    """A table with one line per group, and the cost of a step per point.

    Args:
        groups: Groups to perturb.
        layout: Layout of the forward pass; None before the first batch.
    """
    rows = [HEADERS]
    total = 1.0  # the clean pass
    for number, group in enumerate(groups):
        noise = cost = UNKNOWN
        if layout is not None:
            binding = layout.bindings[number]
            noise = f"{binding.noise_size:,}" if binding.noise_size else "-"
            work = group.estimator.work * (1 - binding.replayed_share)
            makes = group.estimator.makes_queries
            cost = f"{work:.2f}" if makes else "-"
            total += work * group.queries if makes else BACKWARD
        rows.append(
            (
                group.name,
                _targets(group),
                f"{sum(p.numel() for p in group.parameters):,}",
                noise,
                type(group.estimator).__name__ + (" shaped" if group.estimator.shaping else ""),
                queries(group),
                cost,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    if layout is None:
        end = "noise and query cost are known after the first batch, or inspect(inputs, targets)"
    else:
        end = f"about {total:.0f} forward passes per point and step, plus local VJPs"
    return "\n".join([*(line.rstrip() for line in lines), end])


def queries(group: ResolvedGroup) -> str:
    """Queries per point of a group."""
    if not group.estimator.makes_queries:
        return "-"
    return f"auto, {group.queries:g}" if group.automatic else f"{group.queries:g}"


def _targets(group: ResolvedGroup) -> str:
    names = list(group.modules)
    if not names:
        return f"{len(group.parameters)} parameters"
    return names[0] or "model" if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
