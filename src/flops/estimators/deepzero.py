"""DeepZero: coordinate-wise estimation on a pruned coordinate set, with feature reuse.

Chen et al., "DeepZero: scaling up zeroth-order optimization for deep model training", 2024.
For every coordinate i of a sparse set S, and zero elsewhere,

    g_i = (l(theta + sigma e_i) - l(theta)) / sigma.

How many coordinates each parameter tensor gives to S is decided once, by ZO-GraSP: the largest
scores -theta * (H g), with g and H g from random finite differences. Which ones is drawn anew
every few steps. A coordinate reuses all features that end before its own module starts.

(The paper behind this library calls n-SPSA "DeepZero"; that is `SPSA`, and this is the real one.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flops.engine.groups import ResolvedGroup
from flops.engine.queries import Change, Estimate, Queries
from flops.engine.rows import round_counts
from flops.estimators.spsa import SPSA
from flops.passes.intercept import Action, Forward
from flops.passes.local_vjp import Gradients
from flops.passes.prefix import Prefix, nothing
from flops.passes.replay import Passes
from flops.passes.structure import Use
from flops.perturb.parameter_calls import Unit, Units, find_units
from flops.perturb.random import generator


@dataclass(frozen=True)
class DeepZero:
    """Finite differences along single coordinates; `queries` of the group is their number.

    The estimate is exact on its coordinates but for O(sigma) curvature and rounding, and zero
    elsewhere. One coordinate costs one query of every point.

    Args:
        sigma: Step along a coordinate.
        pruning: "zo-grasp" scores the coordinates with 4 * ``score_draws`` queries per point in
            a group's first step (charged); "random" spreads them over parameters by size.
        score_draws: Antithetic draws for each of the two gradients of a score.
        shuffle: Steps after which other coordinates are drawn.
    """

    sigma: float = 1e-3
    pruning: Literal["zo-grasp", "random"] = "zo-grasp"
    score_draws: int = 96
    shuffle: int = 1

    shared = True
    whole_model = False
    unit = 1
    minimum_queries = 1

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.sigma > 0:
            raise ValueError(f"sigma must be positive, not {self.sigma}")
        if self.pruning not in ("zo-grasp", "random"):
            raise ValueError(f"'{self.pruning}' is not one of ['zo-grasp', 'random']")
        if self.score_draws < 1 or self.shuffle < 1:
            raise ValueError("score_draws and shuffle must be at least 1")

    def check(self, group: ResolvedGroup) -> None:
        """Any group will do."""

    def bind(self, group: ResolvedGroup, passes: Passes, reuse: bool) -> Coordinates:
        """Find the units, and for each what can be reused before it."""
        units = find_units(group, passes, reuse)
        calls = passes.structure.calls
        prefixes = [
            passes.prefix(calls[unit.calls[0]].start) if reuse else nothing(passes.structure)
            for unit in units.units
        ]
        return Coordinates(units, tuple(prefixes))

    def estimate(self, binding: Coordinates, queries: Queries) -> Estimate:
        """One finite difference per coordinate of the set."""
        clean = queries.losses.mean().cpu()
        gradients: Gradients = {p: torch.zeros_like(p) for *_, p in binding.places}
        changes, places = [], []
        for number, path, chosen in self._coordinates(binding, queries):
            unit = binding.units.units[number]
            parameter = unit.parameters[path]
            for i in chosen:
                at = torch.unravel_index(i, parameter.shape)  # of any memory format
                step = _step(unit, parameter, at, self.sigma)
                changes.append(Change(binding.prefixes[number], partial(_at_all, unit, step)))
                places.append((parameter, at))
        w = (queries.means(changes) - clean) / self.sigma
        for (parameter, at), slope in zip(places, w, strict=True):
            gradients[parameter][at] += slope.to(parameter.device)
        queries.warn_if_rounding((w * self.sigma).to(queries.losses.dtype))
        return Estimate(gradients)  # no sampling noise: what is missing is zero, not random

    def _coordinates(self, binding: Coordinates, queries: Queries) -> list[tuple[int, str, Tensor]]:
        """The set S: by unit and parameter, flat positions."""
        places = binding.places
        units = binding.units.units
        sizes = torch.tensor([units[number].size(path) for number, path, _ in places])
        wanted = min(int(queries.counts[0]), int(sizes.sum()))
        if "ratios" not in queries.memory:
            ratios = sizes.double()
            if self.pruning == "zo-grasp":
                ratios = self._grasp(binding, queries, wanted)
            queries.memory["ratios"] = ratios / ratios.sum()
        counts = _capped(queries.memory["ratios"], sizes, wanted)
        seed, step, group = queries.key
        chosen = []
        for place, (number, path, parameter) in enumerate(places):
            source = generator(seed, step // self.shuffle, group, place)
            order = torch.randperm(int(sizes[place]), generator=source)[: int(counts[place])]
            if path in units[number].padding:  # what only pads is not in the set
                width = parameter[0].numel()
                order = order + width * (order >= width * units[number].padding[path])
            if len(order):
                chosen.append((number, path, order))
        return chosen

    def _grasp(self, binding: Coordinates, queries: Queries, wanted: int) -> Tensor:
        """How many of the best-scored coordinates lie in each parameter."""
        counts = torch.full((queries.size,), 2 * self.score_draws)
        scoring = replace(queries, counts=counts, memory={})
        spsa = SPSA(sigma=self.sigma, shared=True)
        # The same noise for both, so that their difference is not drowned in it.
        here = spsa.estimate(binding.units, scoring).gradients
        saved = {p: p.data for p in here}
        try:
            for parameter, gradient in here.items():
                moved = parameter.data + self.sigma * gradient
                parameter.data = moved.to(parameter.dtype)
            there = spsa.estimate(binding.units, scoring).gradients
        finally:
            for parameter, data in saved.items():
                parameter.data = data
        scores = [-p.detach() * (there[p] - here[p]) / self.sigma for *_, p in binding.places]
        for score, (number, path, _) in zip(scores, binding.places, strict=True):
            if path in binding.units.units[number].padding:
                score[binding.units.units[number].padding[path]] = -torch.inf
        best = torch.cat([score.flatten() for score in scores]).topk(wanted).indices
        owner = torch.repeat_interleave(
            torch.arange(len(scores)), torch.tensor([score.numel() for score in scores])
        )
        return torch.bincount(owner[best.cpu()], minlength=len(scores)).double()


@dataclass(frozen=True)
class Coordinates:
    """Units of the group and the prefix of each."""

    units: Units
    prefixes: tuple[Prefix, ...]

    @property
    def needed(self) -> frozenset[int]:
        """Calls to record."""
        return self.units.needed.union(*(prefix.needed for prefix in self.prefixes))

    @property
    def places(self) -> list[tuple[int, str, nn.Parameter]]:
        """Every parameter at every unit that uses it."""
        return [
            (number, path, parameter)
            for number, unit in enumerate(self.units.units)
            for path, parameter in unit.parameters.items()
        ]

    def covers(self, use: Use) -> bool:
        """While a unit of that parameter runs."""
        return self.units.covers(use)


def _at_all(unit: Unit, action: Action) -> dict[int, Action]:
    return dict.fromkeys(unit.calls, action)


def _step(unit: Unit, parameter: nn.Parameter, at: tuple[Tensor, ...], sigma: float) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        data = parameter.data
        moved = data.clone()
        moved[at] += sigma
        try:
            with unit.clean_padding():
                parameter.data = moved
                return forward(*args, **kwargs)
        finally:
            parameter.data = data

    return action


def _capped(ratios: Tensor, sizes: Tensor, wanted: int) -> Tensor:
    """Counts that follow the ratios but never exceed a parameter's size."""
    counts = torch.zeros_like(sizes)
    while (left := wanted - int(counts.sum())) > 0:
        room = counts < sizes
        shares = torch.where(room, ratios, torch.zeros_like(ratios))
        if float(shares.sum()) == 0:  # the chosen parameters are full: take the others
            shares = room.double()
        counts = torch.minimum(counts + round_counts(shares, left, floor=0), sizes)
    return counts
