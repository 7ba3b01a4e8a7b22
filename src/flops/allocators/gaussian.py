"""The Gaussian allocator (the paper's GA): a learned Gaussian process with its mean by loss.

    A ~ N(mu, Sigma),  mu_j = beta0 + beta1 tanh(l_j),
    Sigma_jk = sigma^2 exp(-(1 - cos(e_j, e_k)) / (2 gamma^2)),

with the points' embeddings e. The four parameters per group minimise J = E[sum_j Tr_j / A_j] by the
likelihood-ratio gradient: K allocations are sampled, each is clipped and normalised to the budget,
and Adam takes steps along E[(log J - its mean) * score]. All scores are closed-form. Counts are
then one sample, clipped, normalised and rounded.

By convexity the optimal sigma is 0, so it has a lower bound; the kernel only matters until then.

Samples depend on the position in the batch; the engine sorts points by data set index if given, so
that counts do not depend on the order of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flops.allocators.base import Learner, Signal, Traces
from flops.allocators.counts import Array, feasible, measured, objective, round_counts
from flops.perturb.random import mix

Feature = Literal["tanh", "standardised"]
JITTER = 1e-3
SETTLED = 100  # updates
MOST_CORRELATED = 2048  # points; the kernel of 10,000 would take 800 MB, and minutes to factorise
SETTLING = 50  # updates until Adam's step is halved
LEAST_RATE = 0.05  # of Adam's initial step
LOG_SIGMA = (np.log(0.03), np.log(1.0))
LOG_GAMMA = (-2.0, 2.0)


@dataclass(frozen=True)
class _GaussianState:
    """beta0, beta1, log sigma (relative to the mean count) and log gamma; Adam's averages."""

    theta: Array = field(default_factory=lambda: np.array([1.0, 0.5, np.log(0.2), 0.0]))
    mean: Array = field(default_factory=lambda: np.zeros(4))
    square: Array = field(default_factory=lambda: np.zeros(4))
    updates: int = 0
    calls: int = 0
    fast: float = 0.0
    slow: float = 0.0


@dataclass
class Gaussian(Learner):
    """Learned Gaussian allocation.

    Args:
        feature: "tanh" of the loss (the paper's), or "standardised": tanh of the batch z-score,
            for losses above 2, where tanh saturates (language models).
        kernel: False makes Sigma diagonal (the paper's ablation). It is also diagonal without
            embeddings and for batches of more than 2048 points.
        pilot: Queries per point to learn from before the allocation, as in the paper; 0 learns from
            the queries of a step for the next one.
        min_queries: Minimum queries of a point; 0 drops points, as in the paper.
        samples: K, allocations sampled per update.
        iterations: Maximum updates per step; a third of that after the first hundred, and two when
            J has converged.
        interval: M, steps between two rounds of updates.
        learning_rate: Adam's initial step on the scale-free parameters; it decays to a twentieth.
    """

    feature: Feature = "tanh"
    kernel: bool = True
    pilot: int = 0
    min_queries: int = 1
    samples: int = 32
    iterations: int = 10
    interval: int = 1
    learning_rate: float = 0.1
    _learned: _GaussianState = field(default_factory=_GaussianState, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.feature not in get_args(Feature):
            raise ValueError(f"'{self.feature}' is not one of {list(get_args(Feature))}")
        if self.samples < 4 or self.iterations < 1 or self.interval < 1:
            raise ValueError("samples >= 4, iterations >= 1, interval >= 1 are needed")
        if self.pilot < 0 or self.min_queries < 0:
            raise ValueError("pilot and min_queries must not be negative")

    @property
    def wants_embeddings(self) -> bool:
        """For the kernel only."""
        return self.kernel

    @property
    def converged(self) -> bool:
        """Whether J has converged: the fast and slow averages of its logarithm agree."""
        learned = self._learned
        return learned.updates >= SETTLED and abs(learned.fast - learned.slow) < 0.01

    def parameters(self, mean_queries: float) -> dict[str, float]:
        """beta0, beta1, sigma and gamma of the paper, for a mean number of queries."""
        b0, b1, log_sigma, log_gamma = self._learned.theta
        return {
            "beta0": float(b0 * mean_queries),
            "beta1": float(b1 * mean_queries),
            "sigma": float(np.exp(log_sigma) * mean_queries),
            "gamma": float(np.exp(log_gamma)),
        }

    def allocate(self, signal: Signal) -> Tensor:
        """Sample A, clip, normalise, round."""
        rng = np.random.default_rng(mix(*signal.key, 1))
        b0, b1, log_sigma, log_gamma = self._learned.theta
        noise = rng.standard_normal(len(signal.losses))
        distance = self._distance(signal)
        if distance is not None:
            noise = np.linalg.cholesky(_kernel(distance, log_gamma)) @ noise
        raw = b0 + b1 * self._feature(signal) + np.exp(log_sigma) * noise
        shares = torch.from_numpy(np.maximum(raw, 0.0))
        return round_counts(shares, signal.budget, unit=signal.unit, floor=signal.minimum)

    def mean_counts(self, signal: Signal) -> Array:
        """The mean of the distribution, clipped and normalised."""
        theta = self._learned.theta
        raw = theta[0] + theta[1] * self._feature(signal)
        return feasible(raw, float(signal.budget), float(signal.minimum))

    def learn(self, signal: Signal, traces: Traces) -> None:
        """A few updates on this batch, from the current parameters."""
        calls = self._learned.calls + 1
        if (calls - 1) % self.interval == 0:
            # Many updates until convergence; then a few, to follow the training.
            early = self._learned.updates < SETTLED
            following = 2 if self.converged else max(2, self.iterations // 3)
            self.fit(signal, traces, self.iterations if early else following)
        self._learned = _replace(self._learned, calls=calls)

    def fit(self, signal: Signal, traces: Traces, iterations: int) -> None:
        """Update the parameters this many times on one batch."""
        signal, traces = measured(signal, traces)
        trace = traces.values.double().numpy()
        if len(trace) < 2 or trace.max() <= 0:
            return  # all points look equal
        trace = trace / trace.max()
        rng = np.random.default_rng(mix(*signal.key, 2))
        phi = np.stack([np.ones(len(trace)), self._feature(signal)], axis=1)  # (B, 2)
        distance = self._distance(signal)
        mean = signal.budget / len(trace)
        # The minimum of J over real counts makes batches comparable. The logarithm keeps single
        # points with few queries from dominating.
        ideal = float(np.sqrt(trace).sum() ** 2 / signal.budget)
        # J is undefined for dropped points; without their cost, dropping all would be optimal.
        floor = min(mean, float(max(signal.minimum, signal.unit)))
        root, whitened = None, phi
        for i in range(iterations):
            renew = i % 10 == 0  # factorisation is expensive, and gamma changes slowly
            if renew:
                root, whitened = _factor(distance, self._learned.theta[3], phi)
            eps = rng.standard_normal((self.samples // 2, len(trace)))
            eps = np.concatenate([eps, -eps])  # antithetic
            raw = self._raw(phi, eps if root is None else eps @ root.T)
            cost = np.log(objective(trace, feasible(raw, float(signal.budget), floor)) / ideal)
            scores = self._scores(eps, whitened, root, distance if renew else None)
            gradient = (cost - cost.mean()) @ scores / len(cost)
            moved = np.array([True, True, True, renew and root is not None])
            self._update(gradient, moved, phi, float(cost.mean()))

    def _raw(self, phi: Array, noise: Array) -> Array:
        theta = self._learned.theta
        return np.asarray(phi @ theta[:2] + np.exp(theta[2]) * noise)

    def _scores(
        self, eps: Array, whitened: Array, root: Array | None, distance: Array | None
    ) -> Array:
        """Gradient of log density of each sample with respect to the four parameters, (K, 4).

        With raw = mu + sigma L eps and K = L L^T: d/d beta = phi^T L^-T eps / sigma,
        d/d log sigma = |eps|^2 - B, and d/d log gamma = (v^T K' v - tr(K^-1 K')) / 2 with
        v = L^-T eps.
        """
        log_sigma, log_gamma = self._learned.theta[2:]
        scores = np.zeros((len(eps), 4))
        scores[:, :2] = eps @ whitened / np.exp(log_sigma)
        scores[:, 2] = np.square(eps).sum(axis=1) - eps.shape[1]
        if distance is not None and root is not None:
            derivative = np.exp(-distance / (2 * np.exp(2 * log_gamma)))
            derivative = derivative * distance / np.exp(2 * log_gamma)
            inverse = np.linalg.inv(root)
            v = eps @ inverse
            trace = float((inverse @ derivative * inverse).sum())
            scores[:, 3] = ((v @ derivative * v).sum(axis=1) - trace) / 2
        return scores

    def _update(self, gradient: Array, moved: Any, phi: Array, cost: float) -> None:
        """Adam on the ``moved`` parameters; then beta is scaled to the mean count of the budget.

        Gamma only changes when its score was computed, so the factorisation matches its value.
        """
        old = self._learned
        # In units of the feature's size, so that small losses learn equally fast.
        size = np.array([1.0, max(1e-6, float(np.sqrt(np.square(phi[:, 1]).mean()))), 1.0, 1.0])
        gradient = gradient / size
        updates = old.updates + 1
        mean = np.where(moved, 0.9 * old.mean + 0.1 * gradient, old.mean)
        square = np.where(moved, 0.99 * old.square + 0.01 * np.square(gradient), old.square)
        step = (mean / (1 - 0.9**updates)) / (np.sqrt(square / (1 - 0.99**updates)) + 1e-12)
        # At the lower bound of sigma the scores are so noisy that full steps do not converge (J up
        # to 30 % above the family's optimum); the remaining rate follows the training.
        rate = self.learning_rate * max(LEAST_RATE, 1 / (1 + old.updates / SETTLING))
        theta = old.theta - np.where(moved, rate * step / size, 0.0)
        middle = float((phi @ theta[:2]).mean())
        if middle > 0.05:
            theta[:2] /= middle
            theta[2] -= np.log(middle)
        theta[2] = np.clip(theta[2], *LOG_SIGMA)
        theta[3] = np.clip(theta[3], *LOG_GAMMA)
        before = (old.fast, old.slow) if old.updates else (cost, cost)
        fast, slow = 0.9 * before[0] + 0.1 * cost, 0.98 * before[1] + 0.02 * cost
        self._learned = _GaussianState(theta, mean, square, updates, old.calls, fast, slow)

    def _feature(self, signal: Signal) -> Array:
        losses = signal.losses.double().numpy()
        if self.feature == "standardised":
            spread = losses.std()
            # Rounding may leave a small spread of equal losses.
            flat = spread <= 1e-12 * np.abs(losses).max()
            losses = (losses - losses.mean()) / (1.0 if flat else spread)
        return np.asarray(np.tanh(losses))

    def _distance(self, signal: Signal) -> Array | None:
        """1 - cosine similarity of the embeddings; None for a diagonal Sigma."""
        if not self.kernel or signal.embeddings is None or len(signal.losses) > MOST_CORRELATED:
            return None
        return _cosine_distance(signal.embeddings.double().numpy())

    def state_dict(self) -> dict[str, Any]:
        """Parameters and Adam's averages."""
        learned = self._learned
        arrays = ("theta", "mean", "square")
        return {name: torch.from_numpy(getattr(learned, name).copy()) for name in arrays} | {
            name: getattr(learned, name) for name in ("updates", "calls", "fast", "slow")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        values: dict[str, Any] = {
            k: v.numpy().copy() if isinstance(v, Tensor) else v for k, v in state.items()
        }
        self._learned = _GaussianState(**values)


def _replace(learned: _GaussianState, **changes: Any) -> _GaussianState:
    return _GaussianState(**{**vars(learned), **changes})


def _cosine_distance(vectors: Array) -> Array:
    """Cosine distance of all pairs; zero and non-finite vectors are similar only to themselves."""
    finite = np.isfinite(vectors).all(axis=1, keepdims=True)
    vectors = np.where(finite, vectors, 0.0)
    # Relative to the largest entry, so that squares do not overflow.
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    vectors = vectors / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.where(norms > 0, norms, 1.0)
    distance = np.clip(1 - vectors @ vectors.T, 0, 2)
    distance[np.diag_indices(len(distance))] = 0
    return np.asarray(distance)


def _kernel(distance: Array, log_gamma: float) -> Array:
    kernel = np.exp(-distance / (2 * np.exp(2 * log_gamma)))
    kernel[np.diag_indices(len(kernel))] += JITTER  # duplicated points make it singular
    return np.asarray(kernel)


def _factor(distance: Array | None, log_gamma: float, phi: Array) -> tuple[Array | None, Array]:
    """L of the kernel and L^-1 phi."""
    if distance is None:
        return None, phi
    root = np.linalg.cholesky(_kernel(distance, log_gamma))
    return np.asarray(root), np.asarray(np.linalg.solve(root, phi))
