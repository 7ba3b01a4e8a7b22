"""Parameter noise that the whole batch shares: MeZO's seed trick.

No more than one module's noise exists at a time (but for small groups, whose noise is kept for the
step): it is made anew from its key whenever it is wanted, and a module's parameters point to their
perturbed copy only while it runs. The parameters
themselves are never written to, so they come back bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flops.engine.queries import Change, Estimate, Queries
from flops.passes.intercept import Action, Forward
from flops.passes.local_vjp import Gradients
from flops.passes.prefix import nothing
from flops.perturb.parameter_calls import Unit, Units
from flops.perturb.random import fill, words

if TYPE_CHECKING:
    from flops.estimators.parameter_noise import ParameterNoise


KEEP = 1 << 22  # noise values of a draw, 16 MB: little beside any process
Kept = dict[tuple[int, int, int], Tensor]
"""Noise by draw, unit and parameter."""


def estimate_shared(options: ParameterNoise, units: Units, queries: Queries) -> Estimate:
    """Mean losses of the batch under each draw, then the sum of slope * noise."""
    draws = int(queries.counts[0]) // options.unit
    # Made once for both signs and the sum, if that is little memory; else made anew each time.
    kept: Kept | None = {} if units.size <= KEEP else None
    signs = (1.0, -1.0)[: options.unit]
    # Without a clean pass there is nothing to replay.
    recorded = units.prefix.needed <= queries.record.keys()
    prefix = units.prefix if recorded else nothing(units.structure)
    clean = queries.losses.mean().cpu()
    gradients: Gradients = {}
    means, slopes = [], []
    # Draw by draw; processes exchange the losses of all draws at once.
    for part in [range(draws)] if not queries.team.alone else [[i] for i in range(draws)]:
        changes = [
            Change(prefix, partial(_shift_all, options, units, queries, draw, sign, kept))
            for draw in part
            for sign in signs
        ]
        means.append(queries.means(changes))
        slopes.append(options._slopes(means[-1], clean))
        for draw, w in zip(part, slopes[-1].tolist(), strict=True):
            for number, unit in enumerate(units.units):
                for parameter, z in _unit_noise(options, queries, draw, number, unit, kept):
                    if parameter not in gradients:
                        wide = torch.promote_types(torch.float32, parameter.dtype)
                        gradients[parameter] = torch.zeros_like(parameter, dtype=wide)
                    gradients[parameter].add_(z, alpha=w / draws)
    loss = float(torch.cat(means).mean())
    return Estimate(gradients, torch.cat(slopes), None, float(units.size), loss=loss)


def _draw(
    options: ParameterNoise,
    queries: Queries,
    draw: int,
    unit: int,
    place: int,
    parameter: nn.Parameter,
) -> Tensor:
    source = words(*queries.key, draw, unit, place)
    z = fill(options.noise, 1, parameter.numel(), source).view(parameter.shape)
    return z.to(parameter.device, parameter.dtype)


def _unit_noise(
    options: ParameterNoise,
    queries: Queries,
    draw: int,
    number: int,
    unit: Unit,
    kept: Kept | None,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for place, (path, parameter) in enumerate(unit.parameters.items()):
        z = None if kept is None else kept.get((draw, number, place))
        if z is None:
            z = _draw(options, queries, draw, number, place, parameter)
            if path in unit.padding:
                z[unit.padding[path]] = 0
            if kept is not None:
                if kept and next(iter(kept))[0] != draw:
                    kept.clear()
                kept[draw, number, place] = z
        yield parameter, z


def _shift_all(
    options: ParameterNoise,
    units: Units,
    queries: Queries,
    draw: int,
    sign: float,
    kept: Kept | None,
) -> dict[int, Action]:
    around: dict[int, Action] = {}
    for number, unit in enumerate(units.units):
        action = _shift(options, queries, draw, sign, number, unit, kept)
        around.update(dict.fromkeys(unit.calls, action))
    return around


def _shift(
    options: ParameterNoise,
    queries: Queries,
    draw: int,
    sign: float,
    number: int,
    unit: Unit,
    kept: Kept | None,
) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        saved = [(p, p.data) for p in unit.parameters.values()]
        try:
            with unit.clean_padding():
                for parameter, z in _unit_noise(options, queries, draw, number, unit, kept):
                    parameter.data = torch.add(parameter.data, z, alpha=sign * options.sigma)
                return forward(*args, **kwargs)
        finally:
            for parameter, data in saved:
                parameter.data = data

    return action
