"""Neyman allocation: the optimal deterministic counts of Theorem 2, from noisy traces.

J is minimal for A_j proportional to sqrt(Tr_j). Traces from a few queries are very noisy, and
plugging them in wastes most of the gain; so they are shrunk towards a regression on the loss.

For n directional derivatives w ~ N(0, T), the log of their mean square has the mean
log T + digamma(n/2) - log(n/2) and the variance trigamma(n/2). So y_j, the corrected log, is an
unbiased measurement of log Tr_j with known variance v_j. The model is log Tr_j = x_j^T c + r_j with
r_j ~ N(0, tau^2) and x_j polynomial in asinh(loss / scale): c and tau are fitted to all steps so
far (with decay), and the posterior of log Tr_j is normal with mean m_j and variance s_j. The counts
that minimise E[sum Tr_j / A_j] are proportional to sqrt(E[Tr_j]) = exp((m_j + s_j / 2) / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flops.allocators.base import Learner, Signal, Traces
from flops.allocators.counts import Array, round_counts
from flops.errors import QueryError

DEGREE = 2
DECAY = 0.9
RIDGE = 1e-3
LEAST_SPREAD = 0.02  # lower bound of tau^2
MOST_SPREAD = 10.0  # upper bound of tau^2, for outlier batches
OUTLIER = 30.0  # log traces are clipped to this distance from the batch's median
FORGET = 0.7  # decay of a point's own measurements until its next visit


@dataclass(frozen=True)
class _NeymanState:
    """Sufficient statistics of the regression, variance of its residuals, residuals by point."""

    scale: float = 0.0
    gram: Array = field(default_factory=lambda: np.zeros((DEGREE + 1, DEGREE + 1)))
    moment: Array = field(default_factory=lambda: np.zeros(DEGREE + 1))
    spread: float = 1.0
    spread_weight: float = 1.0  # the prior counts as one point: regularises small samples
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # sorted
    residual: Array = field(default_factory=lambda: np.zeros(0))  # of these, precision-weighted
    precision: Array = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class _Pilot:
    """Log traces of a pilot and their variances, and the key of its batch."""

    key: tuple[int, ...]
    y: Array
    v: Array


@dataclass
class Neyman(Learner):
    """Counts proportional to the square root of the expected traces.

    Args:
        pilot: Queries per point, measured on this batch before the allocation; 0 uses the
            regression and, with ``running``, earlier measurements of a point.
        min_queries: Minimum queries of a point.
        running: Keep measurements of single points across epochs; needs `estimate(..., index=)`.
        shrink: False plugs the raw pilot traces in, for ablations only.
        across_groups: Also distribute one total budget over the groups, by trace and cost of a
            query; the groups' `queries` then only set the total cost.
    """

    pilot: int = 0
    min_queries: int = 1
    running: bool = False
    shrink: bool = True
    across_groups: bool = False
    most_points = None  # a regression is linear in the points
    _learned: _NeymanState = field(default_factory=_NeymanState, init=False, repr=False)
    _fresh: _Pilot | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.pilot < 0 or self.min_queries < 0:
            raise ValueError("pilot and min_queries must not be negative")
        if not self.shrink and not self.pilot:
            raise ValueError("shrink=False plugs in pilot traces; set pilot to 2 or more")

    def allocate(self, signal: Signal) -> Tensor:
        """Counts by the expected traces; equal before the first update.

        Raises:
            QueryError: If the budget is too small, or ``running`` is set without an index.
        """
        if self.running:
            _places(signal)  # raise before any query is made
        shares = torch.from_numpy(np.exp(self.log_expected(signal) / 2))
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)

    def log_expected(self, signal: Signal) -> Array:
        """Log E[Tr_j] of each point, relative to the largest."""
        learned, fresh = self._learned, self._fresh
        if fresh is not None and (fresh.key != signal.key or len(fresh.y) != len(signal.losses)):
            fresh = None  # of another batch
        if fresh is not None and not self.shrink:
            seen = np.isfinite(fresh.v)
            raw = np.where(seen, fresh.y, fresh.y[seen].mean() if seen.any() else 0.0)
            return np.asarray(raw - raw.max())
        if not learned.gram.any():
            return np.zeros(len(signal.losses))
        mean = _predict(learned, signal)
        weight, weighted = np.full(len(mean), 1 / learned.spread), np.zeros(len(mean))
        if self.running:  # includes a pilot's measurement
            kept, precision = _recall(learned, signal)
            weight, weighted = weight + precision, weighted + kept
        elif fresh is not None:
            weight = weight + 1 / fresh.v
            weighted = weighted + (fresh.y - mean) / fresh.v
        expected = mean + weighted / weight + 0.5 / weight
        return np.asarray(np.clip(expected - expected.max(), -60, 0))

    def learn(self, signal: Signal, traces: Traces) -> None:
        """Update regression, variance and running residuals with the log traces."""
        self.note_own(signal, traces)
        y, v = measure(traces)
        seen = np.isfinite(v)
        if not seen.any():
            return
        middle = np.median(y[seen])
        y = np.where(seen, np.clip(y, middle - OUTLIER, middle + OUTLIER), 0.0)
        old = self._learned
        scale = old.scale or 1e-3 * float(signal.losses.double().abs().mean()) or 1.0
        x = _features(signal, scale)
        weight = np.where(seen, 1 / (old.spread + v), 0.0)
        gram = DECAY * old.gram + (x * weight[:, None]).T @ x
        moment = DECAY * old.moment + (x * weight[:, None]).T @ y
        learned = _with(old, scale=scale, gram=gram, moment=moment)
        residual = y - _predict(learned, signal)
        # Residuals of a fit are too small: E[residual^2] = (1 - leverage) (tau^2 + v).
        leverage = weight * (x * np.linalg.solve(gram + _ridge(), x.T).T).sum(axis=1)
        left = np.clip(1 - leverage, 0.0, 1.0)
        excess = float((np.square(residual) - left * v)[seen].sum())
        kept = DECAY * old.spread_weight
        total = float(kept + left[seen].sum())
        spread = min(max((kept * old.spread + excess) / total, LEAST_SPREAD), MOST_SPREAD)
        learned = _with(learned, spread=spread, spread_weight=total)
        if self.running:
            learned = _remember(learned, signal, residual, v)
        self._learned = learned

    def note_own(self, signal: Signal, traces: Traces) -> None:
        """Keep a pilot's log traces for the allocation of the same points."""
        self._fresh = _Pilot(signal.key, *measure(traces)) if self.pilot else None

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
        self._learned = _NeymanState(**values)


def measure(traces: Traces) -> tuple[Array, Array]:
    """Unbiased log traces and their variances; 0 and infinite for points without a valid trace.

    These made no draw, or their directional derivatives overflowed. If all traces of the batch are
    0, none is valid: derivatives of exactly 0 indicate rounding.
    """
    values, n = traces.values.double(), traces.draws.double()
    seen = (n > 0) & torch.isfinite(values) & (values >= 0)
    largest = float(values[seen].max()) if bool(seen.any()) else 0.0
    seen &= torch.tensor(largest > 0)
    half = n.clamp(min=1) / 2
    # Relative to the largest, since the mean of huge numbers overflows.
    relative = torch.where(seen, values / (largest or 1.0), 1.0)
    least = 1e-12 * float(relative[seen].mean()) if bool(seen.any()) else 1.0
    y = relative.clamp(min=least).log() + math.log(largest or 1.0)
    y = torch.where(seen, y - torch.digamma(half) + half.log(), 0.0)
    v = torch.where(seen, torch.polygamma(1, half), torch.inf)
    return y.numpy(), v.numpy()


def _with(learned: _NeymanState, **changes: Any) -> _NeymanState:
    return _NeymanState(**{**vars(learned), **changes})


def _features(signal: Signal, scale: float) -> Array:
    # asinh is a logarithm for losses above the scale, and defined for zero and negative ones.
    ratio = np.clip(signal.losses.double().numpy() / scale, -1e30, 1e30)
    z = np.arcsinh(ratio) / 5
    return np.stack([z**power for power in range(DEGREE + 1)], axis=1)


def _ridge() -> Array:
    return RIDGE * np.diag([1e-6, *[1.0] * DEGREE])  # the intercept is hardly regularised


def _predict(learned: _NeymanState, signal: Signal) -> Array:
    coefficients = np.linalg.solve(learned.gram + _ridge(), learned.moment)
    return np.asarray(_features(signal, learned.scale) @ coefficients)


def _places(signal: Signal) -> Any:
    if signal.index is None:
        raise QueryError(
            f"group '{signal.group}': Neyman(running=True) follows single points; pass their "
            "positions in the data set as estimate(..., index=...)"
        )
    return signal.index.long().numpy()


def _recall(learned: _NeymanState, signal: Signal) -> tuple[Array, Array]:
    places, known = _places(signal), learned.places
    if not len(known):
        return np.zeros(len(places)), np.zeros(len(places))
    at = np.minimum(np.searchsorted(known, places), len(known) - 1)
    here = known[at] == places
    return np.where(here, learned.residual[at], 0.0), np.where(here, learned.precision[at], 0.0)


def _remember(learned: _NeymanState, signal: Signal, residual: Array, v: Array) -> _NeymanState:
    kept, precision = _recall(learned, signal)
    everywhere = np.union1d(learned.places, _places(signal))
    residuals, precisions = np.zeros((2, len(everywhere)))
    old = np.searchsorted(everywhere, learned.places)
    residuals[old], precisions[old] = learned.residual, learned.precision
    now = np.searchsorted(everywhere, _places(signal))
    residuals[now] = FORGET * kept + residual / v
    precisions[now] = FORGET * precision + 1 / v
    return _with(learned, places=everywhere, residual=residuals, precision=precisions)
