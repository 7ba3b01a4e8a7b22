"""DeepZero: coordinate-wise estimation on a pruned coordinate set, with feature reuse.

Chen et al., "DeepZero: scaling up zeroth-order optimization for deep model training", 2024.
For every coordinate i of a sparse set S, and zero elsewhere,

    g_i = (l(theta + sigma e_i) - l(theta)) / sigma.

The number of coordinates of each parameter tensor in S is determined once, by ZO-GraSP: the largest
scores -theta * (H g), with g and H g from random finite differences. The coordinates themselves are
resampled every few steps. A coordinate reuses all features of modules before its own.

(The paper behind this library calls n-SPSA "DeepZero"; here that is `SPSA`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flops.allocators.counts import round_counts
from flops.estimators.base import (
    BatchPlan,
    Estimate,
    Estimation,
    Estimator,
    Perturbation,
    Plan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.shared_parameters import mean_losses
from flops.estimators.spsa import SPSA
from flops.estimators.variance import Collected, warn_if_rounding
from flops.passes.binding import Binding
from flops.passes.local_vjp import Gradients
from flops.passes.replay import Action, Forward, Passes, Prefix, empty_prefix
from flops.passes.selection import Selection
from flops.passes.structure import Use
from flops.perturb.parameter_calls import CalledModule, ParameterCalls, find_parameter_calls
from flops.perturb.random import generator


@dataclass(frozen=True)
class DeepZero(Estimator):
    """Finite differences along single coordinates; `queries` of the group is their number.

    The estimate is exact on its coordinates up to O(sigma) curvature and rounding, and zero
    elsewhere. One coordinate costs one query per point.

    Args:
        sigma: Step along a coordinate.
        pruning: "zo-grasp" scores the coordinates with 4 * ``score_draws`` queries per point in
            a group's first step (charged); "random" distributes them over parameters by size.
        score_draws: Antithetic draws for each of the two gradients of a score.
        shuffle: Steps between resamplings of the coordinates.
    """

    sigma: float = 1e-3
    pruning: Literal["zo-grasp", "random"] = "zo-grasp"
    score_draws: int = 96
    shuffle: int = 1

    shared = True

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.sigma > 0:
            raise ValueError(f"sigma must be positive, not {self.sigma}")
        if self.pruning not in ("zo-grasp", "random"):
            raise ValueError(f"'{self.pruning}' is not one of ['zo-grasp', 'random']")
        if self.score_draws < 1 or self.shuffle < 1:
            raise ValueError("score_draws and shuffle must be at least 1")

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> Coordinates:
        """Find the parameter calls, and the prefix of each."""
        found = find_parameter_calls(selection, passes, reuse)
        calls = passes.structure.calls
        prefixes = [
            passes.prefix(calls[called.calls[0]].start) if reuse else empty_prefix(passes.structure)
            for called in found.modules
        ]
        return Coordinates(found, tuple(prefixes))

    def begin(self, binding: Coordinates, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        return _CoordinateWise(self, binding, queries)


class _CoordinateWise(Estimation):
    """One finite difference per coordinate of the set S, after two rounds that score it."""

    joint = True

    def __init__(self, options: DeepZero, binding: Coordinates, queries: Queries) -> None:
        self._options, self._binding, self._queries = options, binding, queries
        self.dtype = queries.losses.dtype
        self._spsa = SPSA(sigma=options.sigma, shared=True)
        self._scoring: Estimation | None = None
        self._here: Gradients | None = None
        self._chosen: list[tuple[int, nn.Parameter, tuple[Tensor, ...]]] | None = None
        self._derivatives = torch.empty(0)

    def plan(self) -> Plan | None:
        """Two scoring rounds in a group's first step, then the coordinates."""
        if self._chosen is not None:
            return None
        if "ratios" not in self._queries.memory and self._options.pruning == "zo-grasp":
            # The same noise for both gradients, so that it cancels in their difference.
            counts = torch.full((self._queries.size,), 2 * self._options.score_draws)
            scoring = replace(self._queries, counts=counts, memory={"warned_of_rounding": True})
            self._scoring = self._spsa.begin(self._binding.calls, scoring, None)  # type: ignore[arg-type]
            return self._scoring.plan()
        self._chosen = list(self._coordinates())
        return BatchPlan([self._binding.by_module[number] for number, *_ in self._chosen])

    def ask(self, rows: Rows) -> Perturbation:
        """One coordinate shifted by sigma."""
        if self._scoring is not None:
            found = self._scoring.ask(rows)
            return found if self._here is None else self._moved(found, self._here)
        assert self._chosen is not None
        number, parameter, at = self._chosen[int(rows.draws[0])]
        called = self._binding.calls.modules[number]
        action = _step(called, parameter, at, self._options.sigma)
        around = dict.fromkeys(called.calls, action)
        return Perturbation(self._binding.by_module[number], around=around)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Losses of all points."""
        return results.losses.cpu()

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Directional derivatives, or the ratios after the scoring rounds."""
        if self._scoring is not None:
            self._scoring.collect(values, points, runner)
            found = Collected()
            self._scoring.write(found, runner)
            self._scoring = None
            if self._here is None:
                self._here = found.gradients
            else:
                ratios = self._grasp(self._here, found.gradients)
                self._queries.memory["ratios"] = ratios / ratios.sum()
            return
        by_pass = values.view(-1, self._queries.size)
        means, clean = mean_losses(by_pass, self._queries, runner.replicas)
        self._derivatives = (means - clean) / self._options.sigma
        differences = (self._derivatives * self._options.sigma).to(self._queries.losses.dtype)
        warn_if_rounding(self._queries, differences)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """Zero except on the coordinates."""
        assert self._chosen is not None
        by_parameter: dict[nn.Parameter, list[tuple[tuple[Tensor, ...], Tensor]]] = {
            p: [] for *_, p in self._binding.places
        }
        for (_, parameter, at), w in zip(self._chosen, self._derivatives, strict=True):
            by_parameter[parameter].append((at, w))
        for parameter, entries in by_parameter.items():
            gradient = torch.zeros_like(parameter)
            for at, w in entries:
                gradient[at] += (w * scale).to(parameter.device)
            sink.add(parameter, gradient)
            sink.complete([parameter])

    def finish(self) -> Estimate:
        """No sampling noise: the other coordinates are zero, not random."""
        return Estimate()

    def _coordinates(self) -> Iterator[tuple[int, nn.Parameter, tuple[Tensor, ...]]]:
        """The set S: number of the module, parameter and index."""
        queries, modules = self._queries, self._binding.calls.modules
        places = self._binding.places
        sizes = torch.tensor([modules[number].size(path) for number, path, _ in places])
        wanted = self._wanted()
        if "ratios" not in queries.memory:
            queries.memory["ratios"] = sizes.double() / sizes.double().sum()
        counts = _capped(queries.memory["ratios"], sizes, wanted)
        seed, step, group = queries.key[:3]
        for place, (number, path, parameter) in enumerate(places):
            source = generator(seed, step // self._options.shuffle, group, place)
            order = torch.randperm(int(sizes[place]), generator=source)[: int(counts[place])]
            if path in modules[number].padding:  # padding is not in the set
                width = parameter[0].numel()
                order = order + width * (order >= width * modules[number].padding[path])
            for i in order:
                yield (
                    number,
                    parameter,
                    torch.unravel_index(i, parameter.shape),
                )  # any memory format

    def _wanted(self) -> int:
        modules = self._binding.calls.modules
        sizes = [modules[number].size(path) for number, path, _ in self._binding.places]
        return min(int(self._queries.counts[0]), sum(sizes))

    def _grasp(self, here: Gradients, there: Gradients) -> Tensor:
        """Number of the best-scored coordinates in each parameter."""
        places, sigma = self._binding.places, self._options.sigma
        scores = [-p.detach() * (there[p] - here[p]) / sigma for *_, p in places]
        for score, (number, path, _) in zip(scores, places, strict=True):
            if path in self._binding.calls.modules[number].padding:
                score[self._binding.calls.modules[number].padding[path]] = -torch.inf
        best = torch.cat([score.flatten() for score in scores]).topk(self._wanted()).indices
        owner = torch.repeat_interleave(
            torch.arange(len(scores)), torch.tensor([score.numel() for score in scores])
        )
        return torch.bincount(owner[best.cpu()], minlength=len(scores)).double()

    def _moved(self, found: Perturbation, gradients: Gradients) -> Perturbation:
        """The same perturbation at parameters shifted by sigma along the first gradient."""

        def wrapped(parameters: Sequence[nn.Parameter], inner: Action) -> Action:
            def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                saved = [(p, p.data) for p in parameters]
                try:
                    for parameter, data in saved:
                        moved = data + self._options.sigma * gradients[parameter]
                        parameter.data = moved.to(parameter.dtype)
                    return inner(forward, args, kwargs)
                finally:
                    for parameter, data in saved:
                        parameter.data = data

            return action

        calls = self._binding.calls
        by_call = {n: tuple(u.parameters.values()) for u in calls.modules for n in u.calls}
        if calls.root is not None and calls.root in found.around:  # all of them for the whole pass
            by_call = {calls.root: calls.parameters}
        around = {n: wrapped(by_call[n], inner) for n, inner in found.around.items()}
        return replace(found, around=around)


class Coordinates(Binding):
    """Parameter calls of the group and the prefix of each."""

    def __init__(self, calls: ParameterCalls, prefixes: tuple[Prefix, ...]) -> None:
        self.calls, self.by_module = calls, prefixes
        self.prefixes = (calls.prefix, *prefixes)

    @property
    def places(self) -> list[tuple[int, str, nn.Parameter]]:
        """Every parameter in every called module that uses it."""
        return [
            (number, path, parameter)
            for number, called in enumerate(self.calls.modules)
            for path, parameter in called.parameters.items()
        ]

    def covers(self, use: Use) -> bool:
        """Whether a called module of the parameter is running."""
        return self.calls.covers(use)


def _step(
    called: CalledModule, parameter: nn.Parameter, at: tuple[Tensor, ...], sigma: float
) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        data = parameter.data
        moved = data.clone()
        moved[at] += sigma
        try:
            with called.clean_padding():
                parameter.data = moved
                return forward(*args, **kwargs)
        finally:
            parameter.data = data

    return action


def _capped(ratios: Tensor, sizes: Tensor, wanted: int) -> Tensor:
    """Counts proportional to the ratios, at most the size of a parameter."""
    counts = torch.zeros_like(sizes)
    while (left := wanted - int(counts.sum())) > 0:
        room = counts < sizes
        shares = torch.where(room, ratios, torch.zeros_like(ratios))
        if float(shares.sum()) == 0:  # the chosen parameters are full: use the others
            shares = room.double()
        counts = torch.minimum(counts + round_counts(shares, left, floor=0), sizes)
    return counts
