"""Automatic numbers of queries: the most expected progress per cost.

With n_g queries per point in group g, whose estimate then has the cosine c_g to the gradient g_g, a
step is expected to make the progress and to take the forward passes

    P(n) = sum_g sqrt(d_g) |g_g| c_g^2(n_g),     C(n) = C_0 + sum_g cost_g n_g.

Steps of Adam have about the length sqrt(d_g), for d_g parameters, and descend by that times
|g_g| c_g; the best learning rate goes with c_g, too. C_0 is the clean pass and the local VJPs. P/C
is largest where queries are added in the order of their progress per cost, as long as the next is
above the average.

Under isotropic noise the variance V of the estimate goes with 1/n, and c^2 = |g|^2 / (|g|^2 + V).
Under shaped noise, c^2 = 1 - e(n) with e the relative error of a point's posterior mean: what n
queries are expected to leave out. Errors of points have much in common, so the batch's is no less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEEP = 0.8  # decay of running averages per step
MOST = 64  # queries per point that are looked ahead
LEAST = 8  # fewer would explore too little to keep the directions up to date


def isotropic_cosines(energy: float, noise: float, queries: float) -> list[float]:
    """Squared cosine of an unbiased estimate with 0, 1, 2, ... queries per point.

    Args:
        energy: Squared norm of the exact gradient.
        noise: Variance of the estimate.
        queries: Mean queries per point that it was made with.
    """
    counts = range(1, MOST + 1)
    found = [energy / (energy + noise * queries / n) if energy > 0 else 0.0 for n in counts]
    return [0.0, *found]


def note_outlook(
    memory: dict[str, Any], weight: float, cosines: Sequence[float], cost: float, local: float
) -> None:
    """Record what a step says of the next one.

    Args:
        memory: State of the group.
        weight: sqrt(d) |g|.
        cosines: Squared cosine with 0, 1, 2, ... queries per point.
        cost: Forward passes of a query.
        local: Forward passes per point of its local VJPs.
    """
    if not math.isfinite(weight):
        return  # a step whose derivatives overflow must not affect later ones
    kept, found = memory.get("outlook"), list(cosines)
    if kept is not None:
        weight = _running(kept["weight"], weight)
        found = [_running(*pair) for pair in zip(kept["cosines"], found, strict=True)]
    memory["outlook"] = {"weight": weight, "cosines": found, "cost": cost, "local": local}


def _running(old: float, new: float) -> float:
    return KEEP * old + (1 - KEEP) * new


def best_queries(
    memory: Mapping[str, Mapping[str, Any]],
    first: Mapping[str, float],
    units: Mapping[str, int],
    least: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Queries per point of each group.

    Args:
        memory: State of the groups.
        first: Queries of a group that nothing is known of yet.
        units: Queries of one draw.
        least: Minimum queries of each group, besides `LEAST`.
    """
    known = {name: memory[name]["outlook"] for name in first if "outlook" in memory[name]}
    lows = {n: max(LEAST, 0 if least is None else least[n]) for n in known}
    found = {n: -(-low // units[n]) * units[n] for n, low in lows.items()}
    most = {name: len(outlook["cosines"]) - 1 for name, outlook in known.items()}

    def progress(name: str, queries: int) -> float:
        outlook = known[name]
        return float(outlook["weight"] * outlook["cosines"][min(queries, most[name])])

    total = sum(progress(name, n) for name, n in found.items())
    cost = 1.0 + sum(known[name]["local"] + known[name]["cost"] * n for name, n in found.items())
    while True:
        gain, best, more = 0.0, "", 0
        for name, n in found.items():
            price = max(known[name]["cost"], 1e-3)
            for count in range(units[name], most[name] - n + 1, units[name]):  # may have a step
                each = (progress(name, n + count) - progress(name, n)) / (price * count)
                if each > gain:
                    gain, best, more = each, name, count
        if not best or gain * cost <= total:
            return {**first, **found}
        total += progress(best, found[best] + more) - progress(best, found[best])
        cost += known[best]["cost"] * more
        found[best] += more
