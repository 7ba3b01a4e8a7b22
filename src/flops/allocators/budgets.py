"""One total budget for several groups: `Neyman(across_groups=True)`.

The groups' variances V_g = (sum_j sqrt(Tr_j))^2 / A_g add up, relative to their gradients, since
under Adam only relative errors count. At a fixed total cost sum_g c_g A_g their sum is least for

    A_g  proportional to  D_g / sqrt(c_g),   D_g = sum_j sqrt(Tr_j) / |g|,

the demand of a group, where a query of it costs c_g.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flops.allocators.base import Traces

KEEP = 0.9  # decay of a group's running demand per step
MOST = 10  # maximum multiple of its own budget, for groups whose queries are almost free


def demand_of(traces: Traces) -> float:
    """sum_j sqrt(Tr_j) of some points."""
    return float(traces.values.double().sqrt().sum())


def note_demand(memory: dict[str, Any], roots: float, norm: float, cost: float) -> None:
    """Update a group's running demand and the cost of its queries.

    Args:
        memory: State of the group.
        roots: sum_j sqrt(Tr_j) of all points.
        norm: Squared norm of its gradient.
        cost: Cost of a query, in forward passes.
    """
    memory["query_cost"] = cost
    if norm <= 0:
        return
    now = roots / norm**0.5
    if math.isfinite(now):  # a step whose derivatives overflow must not affect later ones
        memory["demand"] = KEEP * float(memory.get("demand", now)) + (1 - KEEP) * now


def shared_budgets(
    budgets: Mapping[str, int],
    units: Mapping[str, int],
    least: Mapping[str, int],
    memory: Mapping[str, Mapping[str, Any]],
) -> dict[str, int]:
    """Queries of each group that shares the total, in whole units; initially as configured.

    Args:
        budgets: Configured queries.
        units: Queries of one draw.
        least: Minimum queries of a step.
        memory: State of the groups.
    """
    names = [name for name in budgets if "demand" in memory[name]]
    if len(names) < 2:
        return dict(budgets)
    wanted = split_budgets(
        {name: budgets[name] for name in names},
        {name: max(1e-3, float(memory[name]["query_cost"])) for name in names},
        {name: float(memory[name]["demand"]) for name in names},
        # If the configured queries are too few, the step raises an error.
        {name: min(budgets[name], least[name]) for name in names},
        {name: MOST * budgets[name] for name in names},
    )
    found = {name: int(wanted[name] + 1e-6) // units[name] * units[name] for name in names}
    return {**budgets, **found}


def split_budgets(
    budgets: Mapping[str, float],
    costs: Mapping[str, float],
    demands: Mapping[str, float],
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Queries of each group that minimise the summed variance at the same total cost.

    Args:
        budgets: Queries of each group as configured; their cost is the total.
        costs: Cost of one query of each group, above 0.
        demands: sum_j sqrt(Tr_j), over the norm of the group's gradient, of each group.
        least: Minimum queries of each group; they must not cost more than the total.
        most: Maximum queries of each group.

    Returns:
        Real-valued budgets proportional to demand / sqrt(cost), except for groups at a bound.
    """
    total = sum(budgets[name] * costs[name] for name in budgets)
    shares = {name: demands[name] / costs[name] ** 0.5 for name in budgets}
    if not 0 < sum(shares.values()) < math.inf:
        return {name: float(budget) for name, budget in budgets.items()}
    low = {name: 0.0 if least is None else least[name] for name in budgets}
    high = {name: math.inf if most is None else most[name] for name in budgets}

    def at(multiplier: float) -> dict[str, float]:
        return {n: min(max(multiplier * shares[n], low[n]), high[n]) for n in budgets}

    def costly(multiplier: float) -> bool:
        return sum(found * costs[n] for n, found in at(multiplier).items()) >= total

    # Without bounds this multiplier is the solution; with them the cost is still monotonic in it.
    middle = total / sum(shares[name] * costs[name] for name in budgets)
    below, above = 0.0, middle
    while not costly(above) and above < 1e9 * middle:  # unless all groups are at their maximum
        above *= 2
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (below, middle) if costly(middle) else (middle, above)
    return at(above)
