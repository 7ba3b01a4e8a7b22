"""One step of shaped noise: measure where the gradient lives, and learn from the rest.

A share of the queries is isotropic and sees what the basis misses; the others measure its
directions (`flops.subspace.measurements`). They give the estimate (`flops.subspace.regression`),
the explained variance, and the second moments from which the next step takes its basis
(`flops.subspace.moments`, `flops.subspace.basis`). The first steps are isotropic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.subspace.basis import leading
from flops.subspace.config import Shaping
from flops.subspace.measurements import Design, Measurements, Space, needed, real_directions
from flops.subspace.moments import Change, Moments
from flops.subspace.regression import Regression, coherence, regress
from flops.subspace.report import ShapingReport, SiteReport

TUNE = 4  # steps between looks for a better ridge
AVERAGE = 0.9  # what running averages keep


Decide = Callable[[str, Any], Any]
"""Told name and value of a discrete decision; returns the value that counts."""


@dataclass(frozen=True)
class ShapedEstimate:
    """What shaped noise says about the error of each point's delta.

    Attributes:
        energy: Estimated squared length of the gradient at the noise, shape (B,).
        error: Estimated squared error of its estimate, shape (B,).
        dimensions: Noise values of a row.
        report: For people.
    """

    energy: Tensor
    error: Tensor
    dimensions: int
    report: ShapingReport


class ShapedStep:
    """The queries of a group in one step: `rows` before they run, `collect` when all have.

    Args:
        space: Where the noise goes.
        shaping: Options.
        memory: What earlier steps learned; replaced by `collect`.
        counts: Queries of each point, shape (B,).
        losses: Clean losses, shape (B,).
        decide: Told each discrete decision; returns the one that counts; None for this one.
            Eigenvectors of another machine may have other signs than those that were measured.

    Attributes:
        delta: Estimated gradient of every point's loss at the noise, shape (B, dimensions).
        isotropic: Which of the draws were isotropic, shape (draws,).
        shaped: Energies and errors of delta.
    """

    delta: Tensor
    isotropic: Tensor
    shaped: ShapedEstimate

    def __init__(
        self,
        space: Space,
        shaping: Shaping,
        memory: dict[str, Any],
        counts: Tensor,
        losses: Tensor,
        decide: Decide | None = None,
    ) -> None:
        self.space, self._shaping, self._memory, self._losses = space, shaping, memory, losses
        self._steps = int(memory.get("shaped_steps", 0))
        self._explained = float(memory.get("explained_variance", 0.0))
        self._moments = _moments(memory.get("moments", ()), space)
        draws = counts // space.unit
        share = shaping.share(self._explained)
        # At least one of each kind, if there are two draws.
        iso = torch.minimum((draws * share).round().long(), draws - 1).clamp(min=1)
        iso = draws if shaping.explore == 1 else torch.minimum(iso, draws)
        alike = shaping.explore != 1 and bool((iso == draws).all())
        self._warm = self._steps < shaping.warm or alike
        iso = draws if self._warm else iso
        with _full_precision(space.device):
            known = leading(space.grids, self._moments, needed(space, draws - iso))
        iso = torch.maximum(iso, draws - real_directions(space, known).sum(1).cpu())
        if decide is not None:
            parts = {name: value for name, value in vars(known).items() if name != "grids"}
            kept = decide("directions", {"warm": self._warm, "iso": iso, "known": parts})
            self._warm, iso = bool(kept["warm"]), kept["iso"]
            known = replace(known, **kept["known"])
        self._design = Design(space, known, iso, draws)

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws, shape (draws, dimensions)."""
        return self._design.rows(points, draws)

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor:
        """Derivatives along unit vectors, given those along `rows`."""
        return self._design.scaled(points, draws, derivatives)

    def collect(self, derivatives: Tensor, points: Tensor) -> None:
        """All derivatives of the step, in the order of points and draws: estimate and learn."""
        memory, steps, warm = self._memory, self._steps, self._warm
        space, shaping, explained = self.space, self._shaping, self._explained
        design, draws, iso = self._design, self._design.draws, self._design.iso
        measurements = design.measurements(points, derivatives)
        with _full_precision(space.device):
            ridge = float(memory.get("ridge", 1.0))
            found = regress(measurements, ridge, tune=steps % TUNE == 0)
        whole = float(found.energy.sum())
        now, spread = _explained(found) if whole > 0 else (explained, 0.0)
        after, keep = 0.0, 1.0
        if not warm:
            after = _running(explained, now) if explained else now
            keep, memory["best"] = shaping.keep(now, spread, after, float(memory.get("best", 0.0)))
        if whole > 0:  # else there was nothing to learn from
            with _full_precision(space.device):
                moments = learn(measurements, found, self._moments, keep, steps, self._losses)
            memory["moments"] = [m.to_memory() for m in moments]
            memory["shaped_steps"] = steps + 1
        eta = 1.0
        if warm:
            self.delta = found.outside
            error = found.energy * space.dimensions / draws.clamp(min=1).to(space.device)
        else:
            memory["explained_variance"] = after
            memory["ridge"] = found.ridge
            if not shaping.unbiased:
                eta = _signal(memory, measurements, found)
            self.delta = found.inside + found.tail + eta * found.correction
            fitted = measurements.fitted.clamp(min=1).to(space.device)
            noise = found.error * space.dimensions / fitted
            error = (1 - eta) ** 2 * found.error + eta**2 * noise
        by_site = [0.0] * len(space.grids)
        if not warm:
            by_site = _explained_by_site(measurements, found)
            before = memory.get("explained_by_site", ())
            if len(before) == len(by_site):
                by_site = [_running(*pair) for pair in zip(before, by_site, strict=True)]
            memory["explained_by_site"] = by_site
        site = design.known.site
        measured = [design.measured[:, site == s].sum(1) for s in range(len(space.grids))]
        report = ShapingReport(
            k=float((draws - iso).double().mean()),
            explained_variance=after,
            explore=float(iso.sum()) / max(1, int(draws.sum())),
            correction=eta,
            sites=tuple(
                SiteReport(name, float(k.double().mean()), share)
                for name, k, share in zip(space.names, measured, by_site, strict=True)
            ),
        )
        real = torch.arange(measurements.w.size(1)) < draws.unsqueeze(1)
        at, number = torch.nonzero(real).unbind(1)
        self.isotropic = number < iso[at]
        self.shaped = ShapedEstimate(found.energy.cpu(), error.cpu(), space.dimensions, report)


def _full_precision(device: torch.device) -> torch.autocast:
    """Outside of the user's autocast, which the queries keep."""
    return torch.autocast(device.type, enabled=False)


def _moments(kept: Sequence[Any], space: Space) -> list[Moments]:
    """What is known so far; a site whose positions are no longer aligned keeps its channels."""
    found = [Moments.empty(g, space.dtype, space.device) for g in space.grids]
    if len(kept) != len(found):
        return found
    for s, (g, saved) in enumerate(zip(space.grids, kept, strict=True)):
        m = Moments.from_memory(saved, space.dtype, space.device)
        m = m if g.aligned else Moments(None, m.channels)
        along = m.positions is None or m.positions.size == g.positions
        if m.channels.size == g.channels and along:
            found[s] = m
    return found


def _running(old: float, new: float) -> float:
    return AVERAGE * old + (1 - AVERAGE) * new


def _signal(memory: dict[str, Any], measurements: Measurements, found: Regression) -> float:
    """Share of signal in the summed correction, of this step and those before."""
    whole, noise = coherence(measurements, found)
    if "coherence" in memory:
        whole, noise = (
            _running(a, b) for a, b in zip(memory["coherence"], (whole, noise), strict=True)
        )
    memory["coherence"] = (whole, noise)
    return max(0.0, 1 - noise / whole) if whole > 0 else 0.0


def _explained(found: Regression) -> tuple[float, float]:
    """Share of the energy that was measured, and its standard error over the points."""
    whole = found.energy.sum()
    missed = found.missed.sum() / whole
    error = (found.missed - missed * found.energy).square().sum().sqrt() / whole
    return 1 - float(missed), float(error)


def _explained_by_site(measurements: Measurements, found: Regression) -> list[float]:
    """Share of each site's energy that was measured in this step.

    Residuals do not tell the sites apart, so what they miss in all is split by the energies of
    the plain estimates outside, without their noise.
    """
    n = measurements.iso.clamp(min=1).to(found.missed)
    measured, missed = [], []
    for g in measurements.space.grids:
        square = g.cut(found.outside).square().sum((1, 2)) - found.missed * g.size / n
        missed.append(max(1e-300, float((square * n / (n + 1)).sum())))
        measured.append(float(g.cut(found.inside).square().sum()))
    scale = float(found.missed.sum()) / sum(missed)
    return [a / max(a + b * scale, 1e-300) for a, b in zip(measured, missed, strict=True)]


def learn(
    measurements: Measurements,
    found: Regression,
    moments: Sequence[Moments],
    keep: float,
    step: int,
    losses: Tensor,
) -> list[Moments]:
    """The moments after this step.

    A point's weight is that of inverse variance: the noise of its outer product is about its
    energy over its number of isotropic queries. For Gaussian z,
    E[out out^T] = (1 + 1/n) g g^T + |g|^2 / n I outside of what was measured.
    """
    space, known = measurements.space, measurements.known
    n = measurements.iso.clamp(min=1).to(space.device, space.dtype)
    resolution = torch.finfo(losses.dtype).eps * float(losses.abs().max()) / space.sigma
    live = (found.energy > (10 * resolution) ** 2) & (measurements.iso > 0).to(space.device)
    weight = torch.where(live, n.square() / torch.where(live, found.energy, 1.0), 0.0)
    over = 1 / (n + 1)
    plus = (found.inside + found.outside) * weight.sqrt().unsqueeze(1)
    minus = found.outside * (weight * over).sqrt().unsqueeze(1)
    floor = weight * (1 - over) * found.missed / n
    cover = (floor.unsqueeze(1) * measurements.measured).sum(0)
    learned = []
    for s, (m, g) in enumerate(zip(moments, space.grids, strict=True)):
        mine = torch.nonzero(known.site == s).flatten()
        used = torch.full_like(floor, g.positions)
        if not g.aligned and space.mask is not None:
            used = g.cut(space.mask)[:, :, 0].sum(1).to(floor)
        over_channels = _change(
            g.cut(plus).flatten(0, 1),
            g.cut(minus).flatten(0, 1),
            float((floor * used).sum()),
            known.channels[s],
            known.column[mine],
            cover[mine],
        )
        positions = m.positions
        if positions is not None:
            over_positions = _change(
                g.cut(plus).transpose(1, 2).flatten(0, 1),
                g.cut(minus).transpose(1, 2).flatten(0, 1),
                float(floor.sum()) * g.channels,
                known.positions[s],
                known.row[mine],
                cover[mine],
            )
            positions = positions.updated(keep, over_positions, step)
        learned.append(Moments(positions, m.channels.updated(keep, over_channels, step)))
    return learned


def _change(
    plus: Tensor, minus: Tensor, floor: float, vectors: Tensor, number: Tensor, cover: Tensor
) -> Change:
    summed = plus.new_zeros(vectors.size(1)).index_add_(0, number, cover)
    return Change(plus, minus, floor, vectors, summed)
