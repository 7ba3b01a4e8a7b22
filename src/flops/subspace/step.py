"""One step of shaped noise: ask where earlier queries found the gradient, and learn from the rest.

A share of the queries is isotropic and sees what the known directions miss; the others ask these
(`flops.subspace.measurements`). The answers give the estimate (`flops.subspace.regression`), the
captured energy, and the second moments from which the next step takes its directions
(`flops.subspace.moments`, `flops.subspace.basis`). The first steps are isotropic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flops.engine.meetings import Work, decided
from flops.engine.queries import Queries, Shaped
from flops.engine.report import ShapingReport, SiteReport
from flops.subspace.basis import Directions, leading
from flops.subspace.config import Shaping
from flops.subspace.measurements import Asked, Space, ask, needed, real_directions
from flops.subspace.moments import Change, Moments
from flops.subspace.regression import Explained, coherence, explain

WARM = 4  # isotropic steps before the first directions
TUNE = 4  # steps between looks for a better ridge
AVERAGE = 0.9  # what running averages keep


@dataclass(frozen=True)
class Answers:
    """What the queries showed.

    Attributes:
        delta: Estimated gradient of every point's loss at the noise, shape (B, dimensions).
        slopes: Slope of every draw, shape (draws,).
        points: Its point.
        isotropic: Which of the draws were isotropic.
        shaped: Energies and errors of delta.
    """

    delta: Tensor
    slopes: Tensor
    points: Tensor
    isotropic: Tensor
    shaped: Shaped


def shaped_queries(space: Space, shaping: Shaping, queries: Queries) -> Work[Answers]:
    """Run a group's queries with shaped noise, and learn from them for the next step."""
    memory, draws = queries.memory, queries.counts // space.unit
    steps = int(memory.get("shaped_steps", 0))
    captured = float(memory.get("captured", 0.0))
    moments = _moments(memory.get("moments", ()), space)
    share = shaping.share(captured)
    # At least one of each kind, if there are two draws.
    iso = torch.minimum((draws * share).round().long(), draws - 1).clamp(min=1)
    iso = draws if shaping.explore == 1 else torch.minimum(iso, draws)
    warm = steps < WARM or (shaping.explore != 1 and bool((iso == draws).all()))
    iso = draws if warm else iso
    full_precision = torch.autocast("cpu", enabled=False)  # the queries keep the user's
    with full_precision:
        known = leading(space.grids, moments, needed(space, draws - iso))
    iso = torch.maximum(iso, draws - real_directions(space, known, queries.size).sum(1))
    if space.recorded:
        warm, iso, known = yield from _decided(warm, iso, known)
    asked = yield from ask(space, queries, known, iso, draws)
    with full_precision:
        found = explain(asked, float(memory.get("ridge", 1.0)), tune=steps % TUNE == 0)
    whole = float(found.energy.sum())
    now, spread = _captured(found) if whole > 0 else (captured, 0.0)
    after, keep = 0.0, 1.0
    if not warm:
        after = _running(captured, now) if captured else now
        keep, memory["best"] = shaping.keep(now, spread, after, float(memory.get("best", 0.0)))
    if whole > 0:  # else there was nothing to learn from
        with full_precision:
            moments = learn(asked, found, moments, keep, steps)
        memory["moments"] = [m.to_memory() for m in moments]
        memory["shaped_steps"] = steps + 1
    eta = 1.0
    if warm:
        delta, error = found.outside, found.energy * space.dimensions / draws.clamp(min=1)
    else:
        memory["captured"] = after
        memory["ridge"] = found.ridge
        if not shaping.unbiased:
            eta = _signal(memory, asked, found)
        delta = found.inside + found.tail + eta * found.correction
        noise = found.error * space.dimensions / asked.fitted.clamp(min=1)
        error = (1 - eta) ** 2 * found.error + eta**2 * noise
    captures = [0.0] * len(space.grids)
    if not warm:
        captures = _captures(asked, found)
        before = memory.get("captures", ())
        if len(before) == len(captures):
            captures = [_running(*pair) for pair in zip(before, captures, strict=True)]
        memory["captures"] = captures
    asked_here = [asked.measured[:, known.site == s].sum(1) for s in range(len(space.grids))]
    report = ShapingReport(
        k=float((draws - iso).double().mean()),
        captured=after,
        explore=float(iso.sum()) / max(1, int(draws.sum())),
        correction=eta,
        sites=tuple(
            SiteReport(name, float(k.double().mean()), share)
            for name, k, share in zip(space.names, asked_here, captures, strict=True)
        ),
    )
    real = torch.arange(asked.w.size(1)) < draws.unsqueeze(1)
    shaped = Shaped(found.energy, error, space.dimensions, report)
    points, number = torch.nonzero(real).unbind(1)
    return Answers(delta, asked.w[real], points, number < iso[points], shaped)


def _decided(warm: bool, iso: Tensor, known: Directions) -> Work[tuple[bool, Tensor, Directions]]:
    """What the queries of a step are, decided once."""
    parts = {name: value for name, value in vars(known).items() if name != "grids"}
    value: dict[str, Any] = {"warm": warm, "iso": iso, "known": parts}
    kept = yield from decided("directions", value)
    return bool(kept["warm"]), kept["iso"], replace(known, **kept["known"])


def _moments(kept: Sequence[Any], space: Space) -> list[Moments]:
    """What is known so far; a site whose positions are no longer aligned keeps its channels."""
    found = [Moments.empty(g, space.dtype) for g in space.grids]
    if len(kept) != len(found):
        return found
    for s, (g, saved) in enumerate(zip(space.grids, kept, strict=True)):
        m = Moments.from_memory(saved, space.dtype)
        m = m if g.aligned else Moments(None, m.channels)
        along = m.positions is None or m.positions.size == g.positions
        if m.channels.size == g.channels and along:
            found[s] = m
    return found


def _running(old: float, new: float) -> float:
    return AVERAGE * old + (1 - AVERAGE) * new


def _signal(memory: dict[str, Any], asked: Asked, found: Explained) -> float:
    """Share of signal in the summed correction, of this step and those before."""
    whole, noise = coherence(asked, found)
    if "coherence" in memory:
        whole, noise = (
            _running(a, b) for a, b in zip(memory["coherence"], (whole, noise), strict=True)
        )
    memory["coherence"] = (whole, noise)
    return max(0.0, 1 - noise / whole) if whole > 0 else 0.0


def _captured(found: Explained) -> tuple[float, float]:
    """Share of the energy that was measured, and its standard error over the points."""
    whole = found.energy.sum()
    missed = found.missed.sum() / whole
    error = (found.missed - missed * found.energy).square().sum().sqrt() / whole
    return 1 - float(missed), float(error)


def _captures(asked: Asked, found: Explained) -> list[float]:
    """Share of each site's energy that was measured in this step.

    Residuals do not tell the sites apart, so what they miss in all is split by the energies of
    the plain estimates outside, without their noise.
    """
    n = asked.iso.clamp(min=1).to(found.missed)
    measured, missed = [], []
    for g in asked.space.grids:
        square = g.cut(found.outside).square().sum((1, 2)) - found.missed * g.size / n
        missed.append(max(1e-300, float((square * n / (n + 1)).sum())))
        measured.append(float(g.cut(found.inside).square().sum()))
    scale = float(found.missed.sum()) / sum(missed)
    return [a / max(a + b * scale, 1e-300) for a, b in zip(measured, missed, strict=True)]


def learn(
    asked: Asked, found: Explained, moments: Sequence[Moments], keep: float, step: int
) -> list[Moments]:
    """The moments after this step.

    A point's weight is that of inverse variance: the noise of its outer product is about its
    energy over its number of isotropic queries. For Gaussian z,
    E[out out^T] = (1 + 1/n) g g^T + |g|^2 / n I outside of what was asked.
    """
    space, known = asked.space, asked.known
    n = asked.iso.clamp(min=1).to(space.dtype)
    losses = asked.queries.losses
    resolution = torch.finfo(losses.dtype).eps * float(losses.abs().max()) / space.sigma
    live = (found.energy > (10 * resolution) ** 2) & (asked.iso > 0)
    weight = torch.where(live, n.square() / torch.where(live, found.energy, 1.0), 0.0)
    over = 1 / (n + 1)
    plus = (found.inside + found.outside) * weight.sqrt().unsqueeze(1)
    minus = found.outside * (weight * over).sqrt().unsqueeze(1)
    floor = weight * (1 - over) * found.missed / n
    cover = (floor.unsqueeze(1) * asked.measured).sum(0)
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
    summed = torch.zeros(vectors.size(1), dtype=plus.dtype).index_add_(0, number, cover)
    return Change(plus, minus, floor, vectors, summed)
