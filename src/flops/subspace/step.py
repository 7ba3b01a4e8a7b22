"""One step of shaped noise: measure the gradient in its subspace, and update the subspace.

The first draws of a point are isotropic and explore outside of the basis; the others measure the
directions with the most expected energy, one each, so that the directional derivative is the
coordinate. Together they give the estimate (`flops.subspace.regression`), the explained variance,
and the second moments for the basis of the next step (`flops.subspace.moments`). The first steps
are isotropic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flops.passes.loss_view import LossView
from flops.passes.ranks import Replicas
from flops.subspace.basis import Space, needed, real_directions
from flops.subspace.config import Shaping
from flops.subspace.mean_jacobian import MeanJacobian
from flops.subspace.measurements import Design, Measurements
from flops.subspace.moments import ROOM, Moments, kept_moments, leading, learn
from flops.subspace.regression import (
    Regression,
    StepSums,
    better_ridge,
    coherence,
    correction_noise,
    decay,
    explained_by_site,
    explained_variance,
    exploration,
    regress,
)
from flops.subspace.report import ShapedEstimate, ShapingReport, SiteReport

TUNE = 4  # steps between searches for a better ridge
AVERAGE = 0.9  # decay of running averages
DOUBT = 2.5  # times the least reliability: below, the batch's gradient must be above its noise
RECENT = 0.8  # decay of the reliability, which rises fast in the first steps
SEEING, BLIND = 1, 4  # isotropic steps before the first directions, with and without outputs
LARGEST = 64  # queries per point that are looked ahead


Decide = Callable[[str, Any], Any]
"""Called with name and value of each discrete decision; returns the value to use."""


def teachers(sizes: Sequence[int], dimensions: int) -> int:
    """Points of all replicas, if the moments have room to learn from their outputs; else 0.

    Args:
        sizes: Points of each replica.
        dimensions: Noise values of a row, on the replica with the most.
    """
    return sum(sizes) if ROOM // (max(sizes) * dimensions) >= 2 else 0


class ShapedStep:
    """The queries of a group in one step: `rows` before they run, `collect` after all have.

    Args:
        space: Space of the noise.
        shaping: Options.
        memory: State of earlier steps; replaced by `collect`.
        counts: Queries of each point, shape (B,).
        losses: Clean losses, shape (B,).
        decide: Called with each discrete decision; returns the decision to use. For resuming on
            another machine, whose eigenvectors may differ; None uses this process's.
        view: What the loss reads of the outputs; None if only losses are known.
        replicas: Ranks with other points of the same step, which learn together; None for none.
        fitters: Ranks that know all measurements of this batch, and fit a part of its points each;
            None for none.

    Attributes:
        delta: Estimated gradient of every point's loss at the noise, shape (B, dimensions); zero
            for points that other ranks fit.
        isotropic: Mask of the isotropic draws, shape (draws,).
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
        view: LossView | None = None,
        replicas: Replicas | None = None,
        fitters: Replicas | None = None,
    ) -> None:
        self._view, self._replicas = view, replicas or Replicas(space.size)
        self._fitters = fitters
        self.space, self._shaping, self._memory, self._losses = space, shaping, memory, losses
        self._steps = int(memory.get("shaped_steps", 0))
        self._explained = float(memory.get("explained_variance", 0.0))
        self._moments = kept_moments(memory.get("moments", ()), space)
        draws = counts // space.unit
        share = exploration(shaping, self._explained)
        # At least one of each kind, if there are two draws.
        iso = torch.minimum((draws * share).round().long(), draws - 1).clamp(min=1)
        iso = draws if shaping.explore == 1 else torch.minimum(iso, draws)
        alike = shaping.explore != 1 and bool((iso == draws).all())
        warm = shaping.warm
        if warm is None:
            warm = SEEING if memory.get("sees_outputs") else BLIND
        most = [needed(space, shaped) for shaped in (draws - iso, torch.zeros_like(draws))]
        own = [float(not alike), *most, space.dimensions, -space.dimensions]
        agreed = self._replicas.max(torch.tensor(own, dtype=torch.float64)).tolist()
        differ, *most, longest, shortest = map(int, agreed)
        self._warm = self._steps < warm or not differ
        iso = draws if self._warm else iso
        with full_precision(space.device):
            known = leading(space.grids, self._moments, most[self._warm])
        iso = torch.maximum(iso, draws - real_directions(space, known).sum(1).cpu())
        if decide is not None:
            parts = {name: value for name, value in vars(known).items() if name != "grids"}
            kept = decide("directions", {"warm": self._warm, "iso": iso, "known": parts})
            self._warm, iso = bool(kept["warm"]), kept["iso"]
            known = replace(known, **kept["known"])
        self._longest = longest
        # A Jacobian at noise of other sizes is another one.
        self._mean = self._mean_jacobian() if longest == -shortest else None
        with full_precision(space.device):
            prediction = None if self._warm else self._predicted()
            self._design = Design(space, known, iso, draws, prediction, decide)

    def _mean_jacobian(self) -> MeanJacobian | None:
        """The mean Jacobian of the features so far; None if they change with the batch."""
        view = self._view
        if view is None or view.name is None:
            return None
        kept = self._memory.get("mean_jacobian")
        return MeanJacobian.from_memory(kept, view.name, view.size, self.space)

    def _predicted(self) -> tuple[Tensor, float] | None:
        """Predicted gradient of every point, and the share of energy that it should hold."""
        if self._view is None or self._mean is None:
            return None
        found = self._view.coordinates.to(self._mean.values) @ self._mean.values
        if self.space.mask is not None:
            found = found * self.space.mask
        return found, self._mean.common

    def rows(self, points: Tensor, draws: Tensor) -> Tensor:
        """Noise of these draws, shape (draws, dimensions)."""
        return self._design.rows(points, draws)

    def scaled(self, points: Tensor, draws: Tensor, derivatives: Tensor) -> Tensor:
        """Derivatives along unit vectors, given those along `rows`."""
        return self._design.scaled(points, draws, derivatives)

    def collect(self, derivatives: Tensor, points: Tensor, outputs: Tensor | None = None) -> None:
        """All derivatives of the step, in the order of points and draws: estimate and learn.

        Args:
            derivatives: Of the losses, along unit vectors, shape (draws,).
            points: Point of each draw.
            outputs: Of the features of the outputs, shape (draws, p); None without.
        """
        memory, steps, warm = self._memory, self._steps, self._warm
        space, shaping, explained = self.space, self._shaping, self._explained
        seen = None
        if outputs is not None and self._view is not None:
            seen = (outputs, self._view)
        design = self._design
        measurements = every = design.measurements(points, derivatives, seen)
        replicas, first = self._replicas, 0
        if self._fitters is not None:
            replicas, first = self._fitters, self._fitters.offset
            measurements = measurements.part(first, first + replicas.sizes[replicas.rank])
        draws = measurements.draws  # without those that failed
        features = measurements.features
        with full_precision(space.device):
            ridge = float(memory.get("ridge", 1.0))
            found = regress(measurements, ridge, tune=steps % TUNE == 0)
        sums = StepSums.of(measurements, found, design.expected).joined(replicas, measurements)
        seen_sums = sums
        whole = float(sums.fit[0])
        now, spread = explained_variance(sums) if whole > 0 else (explained, 0.0)
        after, keep = 0.0, 1.0
        if not warm:
            after = _running(explained, now) if explained else now
            best = float(memory.get("best", 0.0))
            size = 0 if features is None else teachers(replicas.sizes, self._longest)
            keep, memory["best"] = decay(shaping, now, spread, after, best, size)
        if whole > 0:  # else there is nothing to learn from
            with full_precision(space.device):
                moments = learn(
                    measurements, found, self._moments, keep, steps, self._losses, replicas
                )
            memory["moments"] = [m.to_memory() for m in moments]
            memory["shaped_steps"] = steps + 1
            memory["sees_outputs"] = outputs is not None
            if every.features is not None and self._mean is not None:
                with full_precision(space.device):
                    # The first directions are the best prior of a step that had none.
                    known = leading(space.grids, moments, 0) if warm else None
                    # Its equations are larger than what they are made of: fitters send none.
                    joint = replicas if self._fitters is None else None
                    self._mean = self._mean.updated(every, every.features, joint, known)
                memory["mean_jacobian"] = dict(vars(self._mean))
        eta = 1.0
        if warm and (outputs is None or not whole > 0 or shaping.unbiased):
            self.delta = found.outside
            error = found.energy * space.dimensions / draws.clamp(min=1).to(space.device)
            errors = float(sums.errors[2])
        else:
            if warm:
                measurements, found = self._again(measurements, moments, first)
                sums = StepSums.of(measurements, found).joined(replicas, measurements)
            else:
                memory["explained_variance"] = after
                scores = sums.scores[: len(found.scores)].tolist()
                memory["ridge"] = better_ridge(ridge, scores)
            if not shaping.unbiased:
                eta = _signal(memory, sums)
            self.delta = found.inside + found.tail + eta * found.correction
            noise = correction_noise(measurements, found)
            error = (1 - eta) ** 2 * found.error + eta**2 * noise
            errors = (1 - eta) ** 2 * float(sums.errors[0]) + eta**2 * float(sums.errors[1])
        energy, error = found.energy.cpu(), error.cpu()
        if self._fitters is not None:
            whole_delta = self.delta.new_zeros(space.size, space.dimensions)
            whole_delta[first : first + len(self.delta)] = self.delta
            self.delta = whole_delta
            both = replicas.gather(torch.stack([energy, error], 1), replicas.sizes)
            energy, error = both.unbind(1)
        if space.mask is not None:  # directions extend over padding, whose gradient is zero
            self.delta = self.delta * space.mask
        # The first directions come from the same queries: their error is not held out.
        unknown = warm and outputs is not None and not shaping.unbiased
        reliability = math.nan if unknown else self._reliability(float(sums.fit[0]), errors)
        by_site = [0.0] * len(space.grids)
        if not warm:
            by_site = explained_by_site(sums)
            before = memory.get("explained_by_site", ())
            if len(before) == len(by_site):
                by_site = [_running(*pair) for pair in zip(before, by_site, strict=True)]
            memory["explained_by_site"] = by_site
        size, drawn, isotropic, predicted = seen_sums.counts.tolist()
        measured = (seen_sums.sites[:, 0] / size).tolist()
        report = ShapingReport(
            k=sum(measured),
            explained_variance=after,
            explore=isotropic / max(1.0, drawn),
            correction=eta,
            sites=tuple(
                SiteReport(name, k, share)
                for name, k, share in zip(space.names, measured, by_site, strict=True)
            ),
            predicted=predicted / size,
            reliability=reliability,
            withheld=outputs is not None and self._withheld(reliability),
        )
        real = torch.arange(measurements.w.size(1)) < design.draws.unsqueeze(1)
        at, number = torch.nonzero(real).unbind(1)
        self.isotropic = number < design.iso[at]
        self.shaped = ShapedEstimate(
            energy,
            error,
            space.dimensions,
            report,
            () if unknown else self._left(1 - reliability**2, seen_sums),
        )

    def _reliability(self, energy: float, error: float) -> float:
        """Expected cosine of a point's estimate to its gradient, over the last steps.

        For an estimate without correlation to its error, the squared cosine is 1 - error / energy;
        the error is held out. Sums, not ratios, are averaged: those of a step are noisy.
        """
        sums = (energy, error)
        kept = self._memory.get("reliability")
        if kept is not None:
            old, new = (RECENT, 1 - RECENT)
            sums = (old * kept[0] + new * sums[0], old * kept[1] + new * sums[1])
        if not all(map(math.isfinite, sums)):
            return 0.0
        self._memory["reliability"] = sums
        return max(0.0, 1 - sums[1] / sums[0]) ** 0.5 if sums[0] > 0 else 0.0

    def _withheld(self, reliability: float) -> bool:
        """Whether the gradient is mostly noise: of the points, or, if in doubt, of their sum."""
        shaping, memory = self._shaping, self._memory
        if shaping.unbiased or not shaping.withhold:
            return False
        drowned = memory.get("signal", 1.0) < 1 and reliability < DOUBT * shaping.withhold
        return reliability < shaping.withhold or drowned

    def _left(self, now: float, sums: StepSums) -> tuple[float, ...]:
        """Error over energy with 0, 1, 2, ... queries per point, given that of this step.

        From the energy outside of the directions that they would measure. What this step missed
        beyond its own expectation, more queries would miss, too.
        """
        shaping, points = self._shaping, sums.points
        energies = (sums.prior / points).sort(descending=True).values.cumsum(0)
        count = self._design.known.size
        if self._replicas.several:  # which have more directions where their texts are longer
            count = int((sums.prior > 0).sum())
        inside: list[float] = energies[: max(1, count)].tolist()
        predicted = float(sums.expected) / points

        def outside(queries: int) -> float:
            draws = queries // self.space.unit
            iso = min(max(1, round(draws * exploration(shaping, self._explained))), draws)
            count = min(draws - iso, len(inside))
            if count < 1:
                return 1.0
            before = inside[count - 2] if count > 1 else 0.0
            return float(max(1e-3, 1 - before - max(inside[count - 1] - before, predicted)))

        mean = float(sums.counts[1]) / points * self.space.unit
        here = outside(round(mean))
        scale, beyond = min(1.0, now / here), max(0.0, now - here)
        return tuple(scale * outside(n) + beyond for n in range(LARGEST + 1))

    def _again(
        self, measurements: Measurements, moments: Sequence[Moments], first: int
    ) -> tuple[Measurements, Regression]:
        """Estimate an isotropic step again, with the directions that it has shown itself.

        Args:
            measurements: Of the points that are fitted here.
            moments: The moments after this step.
            first: Number of the first of these points.
        """
        space, iso, draws = measurements.space, measurements.iso, measurements.draws
        with full_precision(space.device):
            known = leading(space.grids, moments, 0)
            design = Design(space, known, iso, draws)
            c = measurements.c.new_zeros(space.size, known.size)
            again = replace(
                measurements,
                known=known,
                prior=design.prior,
                measured=design.measured,
                c=c,
                features=None,
            )
            prediction = self._predicted()
            if prediction is not None:
                predicted = prediction[0][first : first + space.size]
                norms = predicted.norm(dim=1)
                units = predicted / norms.clamp(min=1e-30).unsqueeze(1)
                again = replace(again, predicted=units, a=norms)
            return again, regress(again, 1.0, tune=True)


def full_precision(device: torch.device) -> torch.autocast:
    """Disables the user's autocast, which only the queries use."""
    return torch.autocast(device.type, enabled=False)


def _running(old: float, new: float) -> float:
    return AVERAGE * old + (1 - AVERAGE) * new


def _signal(memory: dict[str, Any], sums: StepSums) -> float:
    """Share of signal in the summed correction, as a running average."""
    whole, noise = coherence(sums)
    if "coherence" in memory:
        whole, noise = (
            _running(a, b) for a, b in zip(memory["coherence"], (whole, noise), strict=True)
        )
    memory["coherence"] = (whole, noise)
    return max(0.0, 1 - noise / whole) if whole > 0 else 0.0
