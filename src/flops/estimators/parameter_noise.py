"""Noise on the parameters: what ES, SPSA, MeZO and n-SPSA have in common.

The paper's equation 2 for z ~ N(0, sigma^2 I) added to the parameters:

    g = (1/B) sum_j (1/A_j) sum_i (l_ij - b_j) z_ij / sigma^2

Draws are independent per point (here; shaped ones in `shaped_parameters`), or shared by the batch
(`shared_parameters`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work, completed
from flops.engine.queries import Estimate, Queries
from flops.errors import CoverageError
from flops.estimators.shaped_parameters import check_size, estimate_shaped_parameters
from flops.estimators.shared_parameters import estimate_shared
from flops.passes.intercept import Action, Forward
from flops.passes.local_vjp import Gradients, add_gradients
from flops.passes.replay import Passes
from flops.passes.structure import Call, Structure
from flops.perturb.noise_layout import Entry
from flops.perturb.parameter_calls import Unit, Units, find_units
from flops.perturb.random import Kind, NoiseStream, fill, words
from flops.perturb.rowwise import (
    RowNoise,
    batch_first,
    is_rank_one,
    thin_of,
    thin_products,
    used_tokens,
)
from flops.subspace.config import Shaping

Baseline = Literal["clean", "antithetic", "none"]
SharedKind = Literal["gaussian", "rademacher"]
FEW = 8  # processes whose sums are kept apart


@dataclass(frozen=True)
class ParameterNoise:
    """Common options of ES and SPSA.

    Args:
        sigma: Noise scale.
        shared: One draw for the whole batch (as in MeZO) instead of one for each point. The
            points' errors are then correlated, so counts must be equal.
        noise: Noise of shared draws, "gaussian" or "rademacher". Independent draws are signs,
            of rank one for matrices.
        shaping: `Shaping()` asks where earlier queries found the gradient, for groups of few
            parameters (prompts, adapters) with independent draws; None is isotropic.
    """

    sigma: float = 1e-3
    shared: bool = False
    noise: SharedKind = "gaussian"
    shaping: Shaping | None = field(default=None, kw_only=True)

    whole_model = False

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.sigma > 0:
            raise ValueError(f"sigma must be positive, not {self.sigma}")
        if self.noise not in ("gaussian", "rademacher"):
            raise ValueError(f"'{self.noise}' is not one of ['gaussian', 'rademacher']")
        if self.shaping is not None and self.shared:
            raise ValueError(
                "shaping needs draws of each point's own, not shared=True: leave one of them out"
            )

    @property
    def _baseline(self) -> Baseline:
        raise NotImplementedError

    @property
    def _isotropic(self) -> Kind:
        """Kind of the isotropic queries among shaped ones."""
        return self.noise

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return 2 if self._baseline == "antithetic" else 1

    @property
    def reads_clean(self) -> bool:
        """Pairs of the whole batch need no clean loss."""
        return not (self.shared and self._baseline == "antithetic")

    @property
    def minimum_queries(self) -> int:
        """One draw per point."""
        return self.unit

    def check(self, group: ResolvedGroup) -> None:
        """Any group will do."""

    def bind(self, group: ResolvedGroup, passes: Passes, reuse: bool) -> Units:
        """Find the calls around which the parameters are perturbed."""
        rowwise = () if self.shared else tuple(thin_products())
        units = find_units(group, passes, reuse, rowwise)
        if self.shaping is not None:
            check_size(group.name, units)
        if not self.shared:
            _check_rows(group.name, units, passes)
        return units

    def estimate(self, binding: Units, queries: Queries) -> Estimate:
        """Run the queries and sum slope * noise."""
        return completed(self.work(binding, queries))

    def work(self, binding: Units, queries: Queries) -> Work[Estimate]:
        """The estimate, with a stop before every exchange with other processes."""
        if self.shaping is not None:
            estimate = yield from estimate_shaped_parameters(self, self.shaping, binding, queries)
        elif self.shared:
            estimate = estimate_shared(self, binding, queries)
        else:
            estimate = yield from _pointwise(self, binding, queries)
        if self._baseline != "none":
            slopes, shaped = estimate.slopes, estimate.shaped
            if shaped is not None:  # asked for little things on purpose: take isotropic ones' size
                slopes = shaped.energy[estimate.points].sqrt()
            loss = None if self.reads_clean else estimate.loss
            queries.warn_if_rounding((slopes * self.sigma).to(queries.losses.dtype), loss)
        return estimate

    def _slopes(self, losses: Tensor, clean: Tensor) -> Tensor:
        """W = (l - b) / sigma for each draw; pairs stand side by side."""
        if self._baseline == "antithetic":
            return (losses[0::2] - losses[1::2]) / (2 * self.sigma)
        return (losses - (clean if self._baseline == "clean" else 0.0)) / self.sigma


def _layout(units: Units) -> tuple[list[Entry], int]:
    entries, offset = [], 0
    for unit in units.units:
        for path, parameter in unit.parameters.items():
            out, rest = parameter.numel(), 0
            if is_rank_one(unit.module, parameter):
                out, rest = parameter.size(0), parameter[0].numel()
            entries.append(Entry(unit, path, parameter, offset, out, rest))
            offset += out + rest
    return entries, offset


def _pointwise(options: ParameterNoise, units: Units, queries: Queries) -> Work[Estimate]:
    entries, size = _layout(units)
    dtype = torch.promote_types(torch.float32, entries[0].parameter.dtype)
    device = entries[0].parameter.device
    gradients = {
        e.parameter: torch.zeros(e.parameter.shape, dtype=dtype, device=e.parameter.device)
        for e in entries
    }
    draws = (queries.counts // options.unit).tolist()
    stream = NoiseStream("rademacher", queries.key, queries.ids, draws, size)
    slopes, once = [], slice(None, None, options.unit)
    chunks = list(queries.chunks(options.unit))
    noise = stream.parts([(rows.points[once], rows.draws[once]) for rows in chunks])
    sizes = torch.full((queries.size,), float(units.size))
    for rows, z in zip(chunks, noise, strict=True):
        at, z = rows.points[once], z.to(device, dtype)  # (draws, size)
        seen: dict[str, Tensor] = {}
        scale = (options.sigma * rows.signs).to(z).unsqueeze(1)  # (R, 1)
        noisy = z.repeat_interleave(options.unit, 0) if options.unit > 1 else z
        around = _perturb_rows(units.structure, entries, noisy, seen, scale)
        losses = queries.run(units.prefix, rows.points, around=around).cpu()
        w = options._slopes(losses, queries.losses[rows.points].cpu()).to(dtype)
        weighted = (rows.weights[once].to(dtype) * w / queries.size).to(device)
        sizes[at] = float(units.size)
        for entry in entries:
            used = seen.get(entry.unit.name)
            if used is not None:  # the rest of the table is not part of the estimate
                used = used[once]
                read = entry.rest * used.sum(1, dtype=torch.float32).cpu()
                sizes[at] += read - entry.unit.size(entry.path)
            _add(gradients[entry.parameter], entry, z, weighted, used)
        slopes.append(w)
    yield
    w, at = queries.everyone(slopes, options.unit, dtype)
    if not queries.team.alone:
        if any(type(unit.module) is nn.Embedding for unit in units.units):
            # Which tokens a row reads is known to the process that ran it.
            gradients = queries.team.add_gradients(gradients, list(gradients))
            sizes = -queries.team.largest(-sizes)
        else:
            gradients = _with_others(options, entries, queries, gradients, w)
    return Estimate(gradients, w, at, sizes)


def _with_others(
    options: ParameterNoise,
    entries: list[Entry],
    queries: Queries,
    mine: Gradients,
    slopes: Tensor,
) -> Gradients:
    """The sum over all processes, from slopes alone: the noise of the others is made again.

    Process by process, so that all of them sum in the same order; many of them make all of it
    again, for a sum over processes would take longer than the noise.
    """
    total = {p: torch.zeros_like(g) for p, g in mine.items()}
    size = entries[-1].offset + entries[-1].out + entries[-1].rest
    draws = (queries.counts // options.unit).tolist()
    stream = NoiseStream("rademacher", queries.key, queries.ids, draws, size)
    team, once = queries.team, slice(None, None, options.unit)
    for rank in range(team.size):
        if rank == team.rank and team.size <= FEW:
            add_gradients(total, mine)
            continue
        part = {p: torch.zeros_like(g) for p, g in mine.items()} if team.size <= FEW else total
        place, _ = team.span(len(slopes), rank=rank)
        for rows in queries.chunks(options.unit, rank):  # as that process cuts them
            z = stream.rows(rows.points[once], rows.draws[once]).to(slopes.dtype)
            w = slopes[place : place + len(z)]
            weighted, place = rows.weights[once].to(w) * w / queries.size, place + len(z)
            for entry in entries:
                home = entry.parameter.device
                _add(part[entry.parameter], entry, z.to(home), weighted.to(home), None)
        if part is not total:
            add_gradients(total, part)
    return total


def _perturb_rows(
    structure: Structure,
    entries: list[Entry],
    noise: Tensor,
    seen: dict[str, Tensor],
    scale: Tensor | float = 1.0,
) -> dict[int, Action]:
    around: dict[int, Action] = {}
    for unit in {entry.unit.name: entry.unit for entry in entries}.values():
        parts = {e.path: e.noise(noise, scale) for e in entries if e.unit is unit}
        for number in unit.calls:
            around[number] = _thin_action(unit, structure.calls[number], parts, seen)
    return around


def _thin_action(unit: Unit, call: Call, parts: RowNoise, seen: dict[str, Tensor]) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(unit.module) is nn.Embedding:
            a, _ = parts["weight"]
            mask = used_tokens(unit.module, batch_first(args, kwargs, len(a), call)).to(a)
            seen[unit.name] = torch.maximum(seen.get(unit.name, mask), mask)
        with unit.clean_padding():
            return thin_of(unit.module)(unit.module, forward, args, kwargs, parts, call)

    return action


def _check_rows(group: str, units: Units, passes: Passes) -> None:
    """A table that all points share is spread over the rows, if the model keeps them apart."""
    calls = [units.structure.calls[number] for unit in units.units for number in unit.calls]
    tables = {c.name for c in calls if any(leaf.axis is None for _, leaf in c.tensors)}
    entries, size = _layout(units)

    def perturb(scale: Tensor) -> dict[str, Any]:
        noise = fill("rademacher", len(scale), size, words(0)) * scale.unsqueeze(1)
        return {"around": _perturb_rows(units.structure, entries, noise / 10, {})}

    if tables and not passes.rows_apart(units.prefix, perturb):
        raise CoverageError(
            f"group '{group}': the output of {sorted(tables)} has no batch axis, and the model "
            "does not take one, so it cannot be perturbed point by point; use shared=True"
        )


def _add(total: Tensor, entry: Entry, z: Tensor, weighted: Tensor, used: Tensor | None) -> None:
    noise = entry.cut(z)
    if not entry.rest:
        total.view(-1).add_(weighted.to(noise) @ noise)
        return
    a, b = noise
    if used is not None:
        a = a * used
    total.view(entry.out, entry.rest).addmm_((a * weighted.to(a).unsqueeze(1)).T, b)
