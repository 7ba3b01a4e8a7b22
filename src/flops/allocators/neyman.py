"""Neyman allocation: the optimal deterministic counts of Theorem 2, from noisy traces.

J is least for A_j proportional to sqrt(Tr_j). Traces from a few queries are very noisy, and
plugging them in wastes most of the gain; so they are shrunk towards a regression on the loss.

With n draws of slopes w ~ N(0, T), log of their mean square is log T + digamma(n/2) - log(n/2) on
average, with variance trigamma(n/2). So y_j, the corrected log, is an unbiased measurement of
log Tr_j with a known variance v_j. The model is log Tr_j = x_j^T c + r_j with r_j ~ N(0, tau^2),
x_j polynomial in asinh(loss / scale): c and tau follow from all steps so far (with decay), and the
posterior of log Tr_j is normal with mean m_j and variance s_j. The best counts under what is
known minimise E[sum Tr_j / A_j]: A_j proportional to sqrt(E[Tr_j]) = exp((m_j + s_j / 2) / 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.allocators.base import Signal, Traces
from flops.allocators.objective import Array
from flops.errors import QueryError
from flops.plan import round_counts

DEGREE = 2
DECAY = 0.9
RIDGE = 1e-3
LEAST_SPREAD = 0.02  # of tau^2: the regression is never believed to the letter
FORGET = 0.7  # what a point's own measurements keep of their weight until its next visit


@dataclass(frozen=True)
class _Learned:
    """Sufficient statistics of the regression, spread of its residuals, residuals by point."""

    scale: float = 0.0
    gram: Array = field(default_factory=lambda: np.zeros((DEGREE + 1, DEGREE + 1)))
    moment: Array = field(default_factory=lambda: np.zeros(DEGREE + 1))
    spread: float = 1.0
    spread_weight: float = 0.0
    residual: Array = field(default_factory=lambda: np.zeros(0))  # precision-weighted, by index
    precision: Array = field(default_factory=lambda: np.zeros(0))


@dataclass
class Neyman:
    """Counts proportional to the square root of the expected traces.

    Args:
        pilot: Queries per point to measure this very batch by before allocating; 0 uses the
            regression and, with ``running``, what earlier visits of a point showed.
        min_queries: Fewest queries of a point.
        running: Keep measurements of single points across epochs; needs `estimate(..., index=)`.
        shrink: False plugs the raw pilot traces in; kept for study only.
        across_groups: Spread one total budget over the groups as well, by trace and by cost of
            a query; the groups' own `queries` then only set the total cost.
    """

    pilot: int = 0
    min_queries: int = 1
    running: bool = False
    shrink: bool = True
    across_groups: bool = False
    _learned: _Learned = field(default_factory=_Learned, init=False, repr=False)
    _fresh: tuple[Array, Array] | None = field(default=None, init=False, repr=False)

    wants_embeddings = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.pilot < 0 or self.min_queries < 0:
            raise ValueError("pilot and min_queries must not be negative")
        if not self.shrink and not self.pilot:
            raise ValueError("shrink=False plugs in pilot traces; set pilot to 2 or more")

    def allocate(self, signal: Signal) -> Tensor:
        """Counts by the expected traces; equal before anything is known."""
        shares = torch.from_numpy(np.exp(self.log_expected(signal) / 2))
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)

    def log_expected(self, signal: Signal) -> Array:
        """Log E[Tr_j] of each point, relative to the largest."""
        learned, fresh = self._learned, self._fresh
        if fresh is not None and not self.shrink:
            return np.asarray(fresh[0] - fresh[0].max())
        if learned.spread_weight == 0:
            return np.zeros(len(signal.losses))
        mean = _predict(learned, signal)
        weight, weighted = np.full(len(mean), 1 / learned.spread), np.zeros(len(mean))
        if self.running:
            kept, precision = _recall(learned, signal)
            weight, weighted = weight + precision, weighted + kept
        if fresh is not None:  # this batch was just measured: its pilot
            weight = weight + 1 / fresh[1]
            weighted = weighted + (fresh[0] - mean) / fresh[1]
        expected = mean + weighted / weight + 0.5 / weight
        return np.asarray(np.clip(expected - expected.max(), -60, 0))

    def learn(self, signal: Signal, traces: Traces) -> None:
        """Measure log traces and refine regression, spread and running residuals."""
        y, v = measure(traces)
        self._fresh = (y, v) if self.pilot else None
        seen = np.isfinite(v)
        if not seen.any():
            return
        old = self._learned
        scale = old.scale or 1e-3 * float(signal.losses.double().abs().mean()) or 1.0
        x = _features(signal, scale)
        weight = np.where(seen, 1 / (old.spread + np.where(seen, v, 1.0)), 0.0)
        gram = DECAY * old.gram + (x * weight[:, None]).T @ x
        moment = DECAY * old.moment + (x * weight[:, None]).T @ np.where(seen, y, 0.0)
        learned = _with(old, scale=scale, gram=gram, moment=moment)
        residual = np.where(seen, y, 0.0) - _predict(learned, signal)
        excess = float((np.square(residual) - v)[seen].mean())
        total = DECAY * old.spread_weight + seen.sum()
        spread = old.spread + (excess - old.spread) * seen.sum() / total
        learned = _with(learned, spread=max(spread, LEAST_SPREAD), spread_weight=float(total))
        if self.running:
            learned = _remember(learned, signal, residual, v, seen)
        self._learned = learned

    def state_dict(self) -> dict[str, Any]:
        """All statistics."""
        return {
            k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v
            for k, v in vars(self._learned).items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        values: dict[str, Any] = {
            k: v.numpy().copy() if isinstance(v, Tensor) else v for k, v in state.items()
        }
        self._learned = _Learned(**values)


def measure(traces: Traces) -> tuple[Array, Array]:
    """Unbiased log traces and their variances; infinite where a point made no draw."""
    values, n = traces.values.double(), traces.draws.double()
    seen = n > 0
    least = 1e-12 * float(values[seen].mean()) if bool(seen.any()) else 1.0
    half = n.clamp(min=1) / 2
    y = values.clamp(min=max(least, 1e-300)).log() - torch.digamma(half) + half.log()
    v = torch.where(seen, torch.polygamma(1, half), torch.inf)
    return y.numpy(), v.numpy()


def split_budgets(
    budgets: dict[str, int], costs: dict[str, float], demands: dict[str, float]
) -> dict[str, float]:
    """Queries of each group so that the total cost stays and the summed variance is least.

    Args:
        budgets: Queries of each group as configured.
        costs: Cost of one query of each group.
        demands: sum_j sqrt(Tr_j), over the norm of the group's gradient, of each group.

    Returns:
        Real-valued budgets proportional to demand / sqrt(cost).
    """
    total = sum(budgets[name] * costs[name] for name in budgets)
    shares = {name: demands[name] / costs[name] ** 0.5 for name in budgets}
    spent = sum(shares[name] * costs[name] for name in budgets)
    if spent <= 0:
        return {name: float(budget) for name, budget in budgets.items()}
    return {name: share * total / spent for name, share in shares.items()}


def _with(learned: _Learned, **changes: Any) -> _Learned:
    return _Learned(**{**vars(learned), **changes})


def _features(signal: Signal, scale: float) -> Array:
    # asinh is a logarithm for losses above the scale, and takes zero and negative ones as well.
    z = np.arcsinh(signal.losses.double().numpy() / scale) / 5
    return np.stack([z**power for power in range(DEGREE + 1)], axis=1)


def _predict(learned: _Learned, signal: Signal) -> Array:
    ridge = RIDGE * np.diag([1e-6, *[1.0] * DEGREE])  # the level is free
    coefficients = np.linalg.solve(learned.gram + ridge, learned.moment)
    return np.asarray(_features(signal, learned.scale) @ coefficients)


def _places(signal: Signal) -> Any:
    if signal.index is None:
        raise QueryError(
            f"group '{signal.group}': Neyman(running=True) follows single points; pass their "
            "positions in the data set as estimate(..., index=...)"
        )
    return signal.index.numpy()


def _recall(learned: _Learned, signal: Signal) -> tuple[Array, Array]:
    places = _places(signal)
    known = places < len(learned.precision)
    safe = np.where(known, places, 0)
    if not len(learned.precision):
        return np.zeros(len(places)), np.zeros(len(places))
    return (
        np.where(known, learned.residual[safe], 0.0),
        np.where(known, learned.precision[safe], 0.0),
    )


def _remember(learned: _Learned, signal: Signal, residual: Array, v: Array, seen: Any) -> _Learned:
    places = _places(signal)
    size = max(len(learned.precision), int(places.max()) + 1)
    kept, precision = np.zeros(size), np.zeros(size)
    kept[: len(learned.residual)] = learned.residual
    precision[: len(learned.precision)] = learned.precision
    gain = np.where(seen, 1 / np.where(seen, v, 1.0), 0.0)
    kept[places] = FORGET * kept[places] + gain * residual
    precision[places] = FORGET * precision[places] + gain
    return _with(learned, residual=kept, precision=precision)
