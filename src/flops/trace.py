"""How noisy an estimate is, from the scalars of the queries alone.

One draw of point j has the covariance trace Tr_j = mean_i w_ij^2 * F_j, with the slopes w and a
factor F_j: |D_theta phi(x_j)|_F^2 for likelihood ratio, the number of perturbed parameters for
ES and SPSA. The batch gradient's variance is then V = (1/B^2) sum_j Tr_j / n_j, n_j draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flops.noise import NoiseStream
from flops.queries import Estimate, Queries
from flops.sites import Sites


def jacobian_energy(sites: Sites, queries: Queries) -> float:
    """Mean over points of |D_theta phi|_F^2, by one random local product.

    For independent signs u_j, E |sum_j D_j^T u_j|^2 = sum_j |D_j|_F^2. It varies little over the
    points and slowly over the steps, so it is measured in a group's first step and kept.
    """
    if "jacobian_energy" not in queries.memory:
        ones = [1] * queries.size
        stream = NoiseStream("rademacher", (*queries.key, -1), queries.ids, ones, sites.size)
        points = torch.arange(queries.size)
        signs = stream.rows(points, torch.zeros_like(points))
        gradients = queries.local(sites.local_prefix, sites.local, sites.split(signs))
        energy = sum(float(g.double().square().sum()) for g in gradients.values())
        queries.memory["jacobian_energy"] = energy / queries.size
    return float(queries.memory["jacobian_energy"])


def mean_by_point(values: Tensor, points: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean of the values of each point, and how many there were; 0 where there were none."""
    counts = torch.zeros(size, dtype=values.dtype).index_add_(0, points, torch.ones_like(values))
    sums = torch.zeros(size, dtype=values.dtype).index_add_(0, points, values)
    return sums / counts.clamp(min=1), counts


def variance(estimate: Estimate, size: int) -> float:
    """V, the trace of the batch gradient's covariance."""
    squares = estimate.slopes.double().square()
    if estimate.points is None:  # shared draws: one slope for the whole batch
        return float(squares.mean()) * estimate.factor / len(squares)
    mean, counts = mean_by_point(squares, estimate.points, size)
    return float((mean / counts.clamp(min=1)).sum()) * estimate.factor / size**2


def signal_to_noise(estimate: Estimate, size: int) -> float:
    """(|g|^2 - V) / V, at least 0: E |g|^2 is the squared true gradient plus V."""
    if len(estimate.slopes) == 0:
        return float("inf")
    noise = variance(estimate, size)
    energy = sum(float(g.double().square().sum()) for g in estimate.gradients.values())
    return max(0.0, energy - noise) / noise if noise > 0 else 0.0
