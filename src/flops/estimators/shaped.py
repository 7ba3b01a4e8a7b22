"""Likelihood ratio with shaped noise: ask where the gradient lives, and fit instead of averaging.

Of a point's queries a share is isotropic; the others use z = lift(eps) with eps ~ N(0, I_k) in the
subspace that earlier steps found. Each point's coordinates are the posterior mean over all of its
queries, exact in the subspace once the shaped ones reach k, where an average still has the squared
relative error (k + 1) / A. The isotropic residuals show what the subspace misses, and teach it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flops.noise import NoiseStream
from flops.posterior import Posterior, posterior
from flops.queries import Estimate, Queries
from flops.shaping import (
    Shaping,
    Subspace,
    choose,
    empty_moments,
    from_memory,
    grid,
    learn,
    to_memory,
)
from flops.sites import Sites
from flops.trace import jacobian_energy

if TYPE_CHECKING:
    from flops.estimators.likelihood_ratio import LikelihoodRatio

WARM = 4  # isotropic steps before the first subspace
ROUNDING = 1e-2  # variance of a shaped slope at unit energy, until it has been measured
KEEP = 0.9  # of running averages


@dataclass(frozen=True)
class _Asked:
    """Slopes and coordinates of all queries, padded by point."""

    w: Tensor  # (B, A)
    e: Tensor  # (B, A, k)
    real: Tensor  # (B, A)
    iso: Tensor  # (B, A)


def explore_share(shaping: Shaping, captured: float) -> float:
    """Share of isotropic queries: it falls as the captured energy is confirmed."""
    if shaping.explore is not None:
        return shaping.explore
    return min(0.5, max(0.1, 0.1 + 0.6 * (1 - captured)))


def estimate_shaped(
    options: LikelihoodRatio, shaping: Shaping, binding: Sites, queries: Queries
) -> Estimate:
    """Queries, posterior mean, local products, and learning for the next step."""
    dtype = torch.promote_types(torch.float32, binding.dtype)
    grids = [grid(site) for site in binding.sites]
    memory = queries.memory
    steps = int(memory.get("shaped_steps", 0))
    moments = from_memory(memory["moments"]) if steps else empty_moments(grids, dtype)
    draws = queries.counts // options.unit
    captured = float(memory.get("captured", 0.0))
    share = explore_share(shaping, captured)
    subspace, iso = None, draws
    if steps >= WARM:
        iso = torch.minimum((draws * share).ceil().long().clamp(min=1), draws)
        asked = float((draws - iso).double().mean())
        if asked >= 1:
            subspace = choose(grids, moments, asked)
        else:
            iso = draws
    noise = _Noise(options, binding, queries, draws, iso, subspace, dtype)
    asked_rows = _ask(options, binding, queries, noise)
    decay = shaping.decay if shaping.decay is not None else 0.98
    if subspace is None:
        delta, learned = _average(asked_rows, noise, moments, grids, decay)
        memory["captured"] = 0.0
    else:
        rounding = float(memory.get("rounding", ROUNDING))
        fit = _fit(asked_rows, subspace, captured, rounding)
        delta, learned = _posterior(asked_rows, fit, noise, moments, grids, decay, shaping)
        _confirm(memory, asked_rows, fit, subspace)
    memory["moments"], memory["shaped_steps"] = to_memory(learned), steps + 1
    memory["k"] = subspace.size if subspace is not None else 0
    memory["explore"] = share if subspace is not None else 1.0
    deltas = binding.split(delta / queries.size)
    gradients = queries.local(binding.local_prefix, binding.local, deltas)
    real = asked_rows.real
    points = torch.nonzero(real)[:, 0]
    w = asked_rows.w[real]
    queries.warn_if_rounding((w * options.sigma).to(queries.losses.dtype))
    return Estimate(gradients, w, points, jacobian_energy(binding, queries))


class _Noise:
    """The noise of every row, made anew whenever it is wanted."""

    def __init__(
        self,
        options: Any,
        binding: Sites,
        queries: Queries,
        draws: Tensor,
        iso: Tensor,
        subspace: Subspace | None,
        dtype: torch.dtype,
    ) -> None:
        self.iso, self.subspace, self.draws, self.size = iso, subspace, draws, binding.size
        self._kind, self._queries, self._dtype = options.noise, queries, dtype

    def streams(self) -> tuple[NoiseStream, NoiseStream | None]:
        """Fresh streams of isotropic and shaped draws."""
        key, ids = self._queries.key, self._queries.ids
        first = NoiseStream(self._kind, key, ids, self.iso.tolist(), self.size)
        if self.subspace is None:
            return first, None
        rest = (self.draws - self.iso).tolist()
        return first, NoiseStream("gaussian", (*key, 1), ids, rest, self.subspace.size)

    def isotropic(self) -> Any:
        """Chunks of (points, draws, z) of the isotropic queries alone."""
        points = torch.repeat_interleave(torch.arange(len(self.iso)), self.iso)
        firsts = torch.cumsum(self.iso, 0) - self.iso
        draws = torch.arange(len(points)) - firsts[points]
        stream, _ = self.streams()
        for at, draw in zip(
            points.split(self._queries.chunk), draws.split(self._queries.chunk), strict=True
        ):
            yield at, draw, stream.rows(at, draw).to(self._dtype)


def _ask(options: Any, binding: Sites, queries: Queries, noise: _Noise) -> _Asked:
    """Run all queries; keep slopes and coordinates only."""
    size, most = queries.size, int(noise.draws.max())
    k = noise.subspace.size if noise.subspace is not None else 0
    dtype = noise._dtype
    w, e = torch.zeros(size, most, dtype=dtype), torch.zeros(size, most, k, dtype=dtype)
    places = torch.arange(most)
    real = places < noise.draws.unsqueeze(1)
    iso = places < noise.iso.unsqueeze(1)
    isotropic, shaped = noise.streams()
    device = binding.sites[0].leaf.device
    for rows in queries.chunks(options.unit):
        once = slice(None, None, options.unit)
        at, draw = rows.points[once], rows.draws[once]
        first = draw < noise.iso[at]
        z = torch.empty(len(at), binding.size, dtype=dtype)
        if bool(first.any()):
            z[first] = isotropic.rows(at[first], draw[first]).to(dtype)
        if noise.subspace is not None:
            if bool(first.any()):
                e[at[first], draw[first]] = noise.subspace.coordinates(z[first])
            rest = ~first
            if shaped is not None and bool(rest.any()):
                later = draw[rest] - noise.iso[at[rest]]
                eps = shaped.rows(at[rest], later).to(dtype)
                e[at[rest], draw[rest]] = eps
                z[rest] = noise.subspace.lift(eps)
        z = z.to(device)
        signed = z if options.unit == 1 else torch.stack([z, -z], 1).flatten(0, 1)
        with torch.inference_mode():
            edits = binding.edits(signed, options.sigma)
            losses = queries.run(binding.query_prefix, rows.points, edits=edits).cpu()
            difference = options._difference(losses, queries.losses[rows.points].cpu())
        w[at, draw] = difference.clone().to(dtype) / options.sigma
    return _Asked(w, e, real, iso)


def _accumulated(noise: _Noise, weights: Tensor) -> Tensor:
    """sum_i weight_i z_i over the isotropic queries of each point, from noise made anew."""
    from flops.estimators.likelihood_ratio import accumulate

    total = torch.zeros(len(weights), noise.size, dtype=weights.dtype)
    for at, draw, z in noise.isotropic():
        accumulate(total, at, weights[at, draw], z)
    return total


def _average(
    asked: _Asked, noise: _Noise, moments: Any, grids: Any, decay: float
) -> tuple[Tensor, Any]:
    """The plain estimate of isotropic queries, and what it teaches."""
    count = asked.real.sum(1).clamp(min=1)
    delta = _accumulated(noise, asked.w / count.unsqueeze(1))
    energy = asked.w.square().sum(1) / count
    floor = float((1 / count)[energy > 0].sum())
    return delta, learn(moments, grids, None, delta, energy, floor, None, decay)


def _fit(asked: _Asked, subspace: Subspace, captured: float, rounding: float) -> Posterior:
    missing = min(0.95, max(0.02, 1 - captured)) if captured else 0.5
    prior = (subspace.prior / subspace.prior.sum() * (1 - missing)).double()
    noise = rounding + torch.where(asked.iso, missing, 0.0).double()
    # Nearly noise-free slopes make the system almost singular: solved in double precision.
    fit = posterior(asked.e.double(), asked.w.double(), noise, asked.real, asked.iso, prior)
    return Posterior(**{name: part.to(asked.w.dtype) for name, part in vars(fit).items()})


def _posterior(
    asked: _Asked,
    fit: Posterior,
    noise: _Noise,
    moments: Any,
    grids: Any,
    decay: float,
    shaping: Shaping,
) -> tuple[Tensor, Any]:
    """The estimate by the fit, and what its residuals teach."""
    subspace = noise.subspace
    assert subspace is not None
    count = asked.iso.sum(1).clamp(min=1).unsqueeze(1)
    inside = subspace.lift(fit.mean)
    missed = _accumulated(noise, torch.where(asked.iso, fit.plain, 0.0) / count)
    missed = missed - subspace.lift(subspace.coordinates(missed))
    residual = (torch.where(asked.iso, fit.plain, 0.0).square() / count).sum(1)
    live = fit.energy > 0
    scale = torch.where(live, fit.energy, 1.0)
    floor = float((residual / count.squeeze(1) / scale)[live].sum())
    covariance = fit.covariance[live].sum(0)
    learned = learn(moments, grids, subspace, inside + missed, fit.energy, floor, covariance, decay)
    if shaping.unbiased:
        rest = _accumulated(noise, torch.where(asked.iso, fit.held_out, 0.0) / count)
        return subspace.lift(fit.left_out) + rest, learned
    return inside, learned


def _confirm(memory: dict[str, Any], asked: _Asked, fit: Posterior, subspace: Subspace) -> None:
    """Running held-out estimate of the captured energy, and of the rounding of shaped slopes."""
    scale = torch.where(fit.energy > 0, fit.energy, math.inf).unsqueeze(1)
    # E[held_out^2] = energy * (missed + doubt): what the fit does not know yet is not missed.
    squares = float((torch.where(asked.iso, asked.w, 0.0).square() / scale).sum())
    missed = (fit.held_out.square() / scale - fit.doubt)[asked.iso & (fit.energy > 0).unsqueeze(1)]
    if len(missed) and squares > 0:
        now = min(1.0, max(0.0, 1 - float(missed.sum()) / squares))
        before = float(memory.get("captured", 0.0)) or now
        memory["captured"] = KEEP * before + (1 - KEEP) * now
    shaped = asked.real & ~asked.iso
    full = shaped.sum(1) > subspace.size + 1  # more equations than unknowns: the rest is noise
    if bool(full.any()):
        left = torch.where(shaped, fit.held_out, 0.0).square().sum(1) / shaped.sum(1).clamp(min=1)
        seen = float((left / scale.squeeze(1))[full].median())
        memory["rounding"] = min(ROUNDING, max(1e-9, seen))
