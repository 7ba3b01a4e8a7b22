"""ES and SPSA with shaped noise, for groups of few parameters.

Per-point noise is added to the group's concatenated parameters (a prompt, an adapter). Measured
directions are dense, so every row runs with its own parameters. Deltas are gradients with respect
to the parameters, and no local VJP is needed:

    gradient = (1/B) sum_j delta_j, split into parameters

A parameter is a grid (tokens x channels for a prompt, outputs x inputs for a Linear), because its
two moments are learned from far fewer queries than one over all pairs of its values. But grids are
uncorrelated by construction, so several small parameters form one flat grid. A row must be small:
there is one full gradient per point in memory.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flops.errors import CoverageError
from flops.estimators.base import (
    Estimate,
    Estimation,
    Perturbation,
    PointPlan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.passes.replay import Action, Forward
from flops.perturb.parameter_calls import CalledModule, Entry, ParameterCalls
from flops.perturb.random import Kind
from flops.perturb.rowwise import batch_first, generic, used_tokens
from flops.subspace.basis import Grid, Space
from flops.subspace.config import Shaping
from flops.subspace.step import ShapedStep

LARGEST = 65_536  # noise values of a row
FLAT = 512  # values up to which several parameters are one grid; its moment costs their cube


def check_size(group: str, calls: ParameterCalls) -> None:
    """Raise if a group has too many parameters."""
    size = sum(entry.out for entry in _side_by_side(calls))
    if size > LARGEST:
        raise CoverageError(
            f"group '{group}': shaped noise on parameters takes a row of {size:,} values for each "
            f"point here, and at most {LARGEST:,} are allowed; use LikelihoodRatio with shaping, "
            "whose noise has the size of an output, or no shaping"
        )


class ShapedNoise(Protocol):
    """Options of the estimator that shaped draws use."""

    @property
    def sigma(self) -> float: ...  # noqa: D102

    @property
    def unit(self) -> int: ...  # noqa: D102

    @property
    def kind(self) -> Kind: ...  # noqa: D102

    def derivatives(self, losses: Tensor, clean: Tensor) -> Tensor: ...  # noqa: D102

    def warn(self, queries: Queries, derivatives: Tensor, loss: float | None = None) -> None: ...  # noqa: D102


class ShapedParameters(Estimation):
    """Shaped queries, then the mean of the points' estimates."""

    def __init__(
        self,
        options: ShapedNoise,
        shaping: Shaping,
        calls: ParameterCalls,
        queries: Queries,
        runner: Runner,
    ) -> None:
        self._options, self._calls, self._queries = options, calls, queries
        self._entries = _side_by_side(calls)
        self.dtype = torch.promote_types(torch.float32, self._entries[0].parameter.dtype)
        self._support = _Support(self._entries, queries.size)
        grids = _grids(self._entries)
        names = (
            [f"{e.called.name}.{e.path}".lstrip(".") for e in self._entries]
            if len(grids) > 1
            else [queries.name]
        )
        space = Space(
            grids,
            options.unit,
            options.kind,
            self.dtype,
            options.sigma,
            names,
            queries.key,
            queries.ids,
            device=self._support.mask.device,
        )
        self._step = ShapedStep(
            space,
            shaping,
            queries.memory,
            queries.counts,
            queries.losses,
            queries.decide,
            replicas=runner.replicas,
        )
        self._plan: PointPlan | None = PointPlan(queries.counts, options.unit)
        self._derivatives, self._points = torch.empty(0), torch.empty(0)

    def plan(self) -> PointPlan | None:
        """One round."""
        plan, self._plan = self._plan, None
        return plan

    def ask(self, rows: Rows) -> Perturbation:
        """Every row runs with its own parameters."""
        once, unit = slice(None, None, self._options.unit), self._options.unit
        z = self._step.rows(rows.points[once], rows.draws[once])
        signed = z if unit == 1 else torch.stack([z, -z], 1).flatten(0, 1)
        noise = self._options.sigma * self._support.without_padding(signed)
        around = _perturb(self._calls, self._entries, noise, rows.points, self._support)
        return Perturbation(self._calls.prefix, around=around)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Directional derivatives along unit vectors."""
        once = slice(None, None, self._options.unit)
        clean = self._queries.losses[rows.points].cpu()
        w = self._options.derivatives(results.losses.cpu(), clean).to(self.dtype)
        return self._step.scaled(rows.points[once], rows.draws[once], w)

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Estimate every point's gradient, and update the subspace."""
        self._step.collect(values, points)
        self._derivatives, self._points = values, points
        self._support.mask = runner.max(self._support.mask)  # known where a row ran
        # Derivatives along known directions may be 0: use the size of isotropic ones.
        self._options.warn(self._queries, self._step.shaped.energy[points].sqrt())

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The mean over the points, split into parameters."""
        mean = (self._step.delta * self._support.mask).mean(0, keepdim=True)  # (1, dimensions)
        last = {entry.parameter: entry for entry in self._entries}  # a tied one has several entries
        for entry in self._entries:
            part = entry.cut(mean).reshape(entry.parameter.shape)
            sink.add(entry.parameter, part * scale)
            if last[entry.parameter] is entry:
                sink.complete([entry.parameter])

    def finish(self) -> Estimate:
        """Directional derivatives, energies and errors."""
        sizes = self._support.mask.sum(1).cpu()
        return Estimate(self._derivatives, self._points, sizes, shaped=self._step.shaped)


def _side_by_side(calls: ParameterCalls) -> list[Entry]:
    entries, offset = [], 0
    for called in calls.modules:
        for path, parameter in called.parameters.items():
            entries.append(Entry(called, path, parameter, offset, parameter.numel(), 0))
            offset += parameter.numel()
    return entries


def _grids(entries: list[Entry], flat: int = FLAT) -> list[Grid]:
    size = entries[-1].offset + entries[-1].out
    if len(entries) > 1 and size <= flat:
        return [Grid(0, 1, size)]
    return [Grid(e.offset, n, e.out // n) for e in entries for n in [_positions(e.parameter.shape)]]


def _positions(shape: torch.Size) -> int:
    """Number of positions of a parameter's grid, so that the two moments are smallest."""
    cuts = [math.prod(shape[:axis]) for axis in range(max(1, len(shape)))]
    return min(cuts, key=lambda n: n + math.prod(shape) // n)


class _Support:
    """Noise entries that affect a point's loss: not those of tokens it does not read, or padding.

    Attributes:
        mask: 1 for these entries, shape (B, dimensions); tokens are filled in as queries run.
    """

    def __init__(self, entries: list[Entry], size: int) -> None:
        self._entries = {(e.called.name, e.path): e for e in entries}
        device = entries[0].parameter.device
        self._noisy = torch.ones(entries[-1].offset + entries[-1].out, device=device)
        self.mask = torch.ones(size, len(self._noisy), device=device)
        for e in entries:
            columns = self._noisy[e.offset : e.offset + e.out].view(e.parameter.shape)
            if e.path in e.called.padding:
                columns[e.called.padding[e.path]] = 0
            if type(e.called.module) is nn.Embedding:
                self.mask[:, e.offset : e.offset + e.out] = 0
        self.mask *= self._noisy

    def without_padding(self, noise: Tensor) -> Tensor:
        """Noise with zeros on padding rows, which are not trained."""
        return noise * self._noisy.to(noise)

    def reads(self, called: CalledModule, points: Tensor, ids: Tensor) -> None:
        """Record the tokens that the rows of these points look up."""
        assert isinstance(called.module, nn.Embedding)
        entry = self._entries[called.name, "weight"]
        read = used_tokens(called.module, ids).to(self.mask.device)  # (R, V)
        wide = read.repeat_interleave(called.module.embedding_dim, 1)
        columns = slice(entry.offset, entry.offset + entry.out)
        self.mask[points, columns] = torch.maximum(self.mask[points, columns], wide)


def _perturb(
    calls: ParameterCalls, entries: list[Entry], noise: Tensor, points: Tensor, support: _Support
) -> dict[int, Action]:
    around: dict[int, Action] = {}
    for called in calls.modules:
        parts = {e.path: e.noise(noise) for e in entries if e.called is called}
        for number in called.calls:
            around[number] = _action(calls, called, number, parts, points, support)
    return around


def _action(
    calls: ParameterCalls,
    called: CalledModule,
    number: int,
    parts: dict[str, Tensor],
    points: Tensor,
    support: _Support,
) -> Action:
    call = calls.structure.calls[number]

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(called.module) is nn.Embedding:
            support.reads(called, points, batch_first(args, kwargs, len(points), call))
        with called.clean_padding():
            return generic(called.module, forward, args, kwargs, parts, call)

    return action
