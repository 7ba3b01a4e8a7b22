"""Automatic sigma: large enough for rounding, small enough for linearity.

Under noise sigma z and -sigma z, the loss changes by l+ - l and l- - l. Half their difference, over
sigma, is the derivative along z; half their sum is what a query gets wrong,

    error(sigma) = (l+ + l- - 2 l) / (2 sigma),

by rounding (it goes with 1/sigma) or by curvature (with sigma). The best sigma has the least error
relative to the derivatives. (Antithetic pairs cancel it; for them the choice is cautious.) One draw
of a few points is run at five sigmas, before the queries of the step: on a coarse grid until its
middle is the best, then on a fine one. The search is repeated every `EVERY` steps, because training
moves both bounds. Its rows are charged like others.

What both signs have in common does not show that noise itself is rounded when it is added to an
output of half precision. With outputs a that are u(a) apart from the next number, a derivative is
wrong by the root mean square of u / sqrt(12) over sigma; that is added to the error.

A quantised model is a staircase. Below the width of a step, both losses change by whole steps that
have nothing to do with each other: the error r is as large as the derivative, sometimes less by
chance. And the best sigma, where steps average out, is not far from curvature. If no error of the
first draws is small, or most of them changed nothing, the search goes on with many draws, and with
the error relative to the derivative without its own part of the steps, r / sqrt(1 - r^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from flops.estimators.base import (
    Estimate,
    Estimation,
    Perturbation,
    Plan,
    PointPlan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.shaped_activations import ActivationNoise
from flops.passes.ranks import Replicas
from flops.passes.replay import Edit
from flops.perturb.activations import Sites
from flops.perturb.random import NoiseStream, signed

Auto = Literal["auto"]
POINTS = 4  # with one draw each
DRAWS = 128  # where these do not tell sigmas apart, at most
SHARE = 0.25  # of the step's queries, at most: each draw is run at all sigmas with both signs
UNCLEAR = 0.1  # error above which they do not
LARGEST = 0.999  # error that leaves a derivative
WITHOUT = 1 / math.sqrt(1 - LARGEST**2)
MORE = -1  # the decision to draw more
COARSE, FINE = 10.0, 10**0.5  # ratio of neighbouring sigmas in the first search, and later
ROUNDS = 8  # of a search
SIDE = 2  # sigmas on either side of the present one
EVERY = 100  # steps until the next search
BETTER = 0.8  # another sigma's error must be below this share of the present one's
FARTHEST = 1e4  # times the first sigma: beyond, the loss does not depend on the noise now
KEY = 11  # in the key of the noise


def chosen(memory: dict[str, Any], step: int) -> tuple[float | None, bool]:
    """Sigma of the last search, None without any; and whether to search in this step."""
    sigma, last = memory.get("sigma", (None, None))
    return sigma, last is None or step - last >= EVERY


def relative_errors(odd: Tensor, even: Tensor) -> list[float]:
    """Error over derivative at each sigma; infinite if all noise was rounded away.

    Args:
        odd: Half of the difference of both losses, shape (draws, sigmas).
        even: Half of their sum, minus the clean loss.
    """
    over, under = (x.double().square().sum(0).sqrt() for x in (even, odd))
    return torch.where(under > 0, over / under.clamp(min=1e-300), torch.inf).tolist()


def rounding(outputs: Tensor) -> float:
    """Mean square of what is lost when numbers of this size and type are rounded: u^2 / 12."""
    _, exponents = torch.frexp(outputs.detach().float())
    units = torch.finfo(outputs.dtype).eps * torch.exp2(exponents.double() - 1)
    return float((units * (outputs != 0)).square().mean()) / 12  # noise on 0 is not rounded


class SigmaSearch(Estimation):
    """A round of queries at several sigmas, then the group's estimation at the best.

    Args:
        options: Options of the noise, at the present sigma.
        binding: The noise sites.
        queries: The group's queries.
        first: Whether it is the group's first search.
        begin: Begins the estimation at a sigma.
        replicas: Ranks with other points: all search together, on a few points of all of them.
    """

    def __init__(
        self,
        options: ActivationNoise,
        binding: Sites,
        queries: Queries,
        first: bool,
        begin: Callable[[float], Estimation],
        replicas: Replicas,
    ) -> None:
        self._binding, self._queries, self._begin = binding, queries, begin
        self._start, self._first = options.scale, first
        self._sigma, self._ratio, self._rounds = self._start, COARSE if first else FINE, 0
        self._powers = torch.arange(-SIDE, SIDE + 1, dtype=torch.float64)
        self.dtype = torch.promote_types(torch.float32, binding.dtype)
        self.width = 2
        self._replicas = replicas
        self._counts = self._spread(POINTS, 1)
        self._found: Estimation | None = None
        self._many = False
        self._rounding: dict[int, tuple[float, int]] = {}
        ones = [1] * queries.size
        self._device = binding.sites[0].leaf.device
        key = (*queries.key, KEY)
        self._stream = NoiseStream("gaussian", key, queries.ids, ones, binding.size, self._device)

    @property
    def found(self) -> Estimation:
        """The estimation at the best sigma."""
        assert self._found is not None, "the search is not over"
        return self._found

    def plan(self) -> Plan | None:
        """Rounds of the search first."""
        return PointPlan(self._counts, unit=2) if self._found is None else self._found.plan()

    def ask(self, rows: Rows) -> Perturbation:
        """The same noise at every sigma, with both signs."""
        if self._found is not None:
            return self._found.ask(rows)
        sigmas = len(self._powers)
        pairs = torch.stack([rows.points[::2], rows.draws[::2] // sigmas])
        (points, draws), places = torch.unique_consecutive(pairs, return_inverse=True, dim=1)
        z = self._stream.rows(points, draws).to(self.dtype)[places.to(self._device)]
        z = z * (self._ratio ** self._powers[rows.draws[::2] % sigmas]).to(z).unsqueeze(1)
        with torch.inference_mode():
            edits = self._binding.edits(signed(z, 2), self._sigma)
        watched = {number: self._watched(number, edit) for number, edit in edits.items()}
        return Perturbation(self._binding.query_prefix, edits=watched, evaluate=_finite)

    def _watched(self, number: int, edit: Edit) -> Edit:
        """An edit that measures the rounding of the outputs, once."""

        def run(out: Any) -> Any:
            if number not in self._rounding:
                values, _ = tree_flatten(out)
                sites = [site for site in self._binding.sites if site.call == number]
                found = [rounding(values[site.leaf_index]) for site in sites]
                sizes = [site.size for site in sites]
                self._rounding[number] = (
                    sum(a * n for a, n in zip(found, sizes, strict=True)),
                    sum(sizes),
                )
            return edit(out)

        return run

    def _with_rounding(self, errors: list[float], rounded: float) -> list[float]:
        """Errors with that of rounded noise added."""
        sigmas = [self._sigma * self._ratio ** float(power) for power in self._powers]
        return [
            math.hypot(error, math.sqrt(rounded) / sigma)
            for error, sigma in zip(errors, sigmas, strict=True)
        ]

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Odd and even part of the change of the losses."""
        if self._found is not None:
            return self._found.tell(rows, results)
        losses, clean = results.losses.cpu(), self._queries.losses[rows.points[::2]].cpu()
        plus, minus = (losses[i::2] - clean for i in (0, 1))
        return torch.stack([(plus - minus) / 2, (plus + minus) / 2], 1).to(self.dtype)

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Move, or begin the queries of the step."""
        if self._found is not None:
            self._found.collect(values, points, runner)
            self.withheld = self._found.withheld
            return
        odd, even = values.view(-1, len(self._powers), 2).unbind(2)
        odd, even, rounded, queries = self._joined(odd, even)
        errors = relative_errors(odd, even)
        if self._many:
            errors = [_without_steps(error) for error in errors]
        if rounded:  # on a rank with rows
            errors = self._with_rounding(errors, rounded)
        unseen = math.isinf(min(errors))  # all noise was rounded away, or nothing depends on it
        best = self._best(errors, odd, unseen)
        best = int(runner.max(torch.tensor(float(best))))  # ranks may round differently
        best = int(self._replicas.max(torch.tensor(float(best))))
        if self._queries.decide is not None:
            best = self._queries.decide("sigma", best)
        if best == MORE:
            self._many = True
            few = max(SHARE * queries, 2 * POINTS)
            most = math.ceil(min(DRAWS, few))
            some = min(most, self._replicas.total)
            self._counts = self._spread(some, math.ceil(most / some))
            return
        self._sigma *= self._ratio ** float(self._powers[best])
        self._rounds += 1
        if self._rounds < ROUNDS and (best != SIDE or self._ratio == COARSE):
            self._ratio = self._ratio if best != SIDE else FINE
            return
        if unseen:
            self._sigma = self._start
        if not (unseen and self._first):  # else the next step searches again
            self._queries.memory["sigma"] = (self._sigma, self._queries.key[1])
        self._found = self._begin(self._sigma)
        found = self._found
        self.partial, self.dtype, self.width = found.partial, found.dtype, found.width

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The gradient at the best sigma."""
        self.found.write(sink, runner, scale)

    def finish(self) -> Estimate:
        """Statistics of the queries at the best sigma."""
        return self.found.finish()

    def _spread(self, points: int, draws: int) -> Tensor:
        """Rows of each point: some draws of some points, at all sigmas and with both signs."""
        total, first = self._replicas.total, self._replicas.offset
        counts = torch.zeros(total, dtype=torch.long)
        places = torch.linspace(0, total - 1, min(points, total)).round().long()
        counts[places] = 2 * len(self._powers) * draws
        self._draws = int(counts.sum()) // (2 * len(self._powers))
        self._before = int(counts[:first].sum()) // (2 * len(self._powers))
        return counts[first : first + self._queries.size]

    def _joined(self, odd: Tensor, even: Tensor) -> tuple[Tensor, Tensor, float, float]:
        """Both parts of all replicas' draws, the mean rounding of outputs, and all queries."""
        parts = torch.zeros(2, self._draws, len(self._powers), dtype=odd.dtype)
        parts[:, self._before : self._before + len(odd)] = torch.stack([odd, even])
        rounding = [sum(x) for x in zip(*self._rounding.values(), strict=True)] or [0.0, 0]
        few = torch.tensor([*rounding, int(self._queries.counts.sum())], dtype=torch.float64)
        parts, few = self._replicas.sum([parts, few])
        squares, sizes, queries = few.tolist()
        return parts[0], parts[1], squares / sizes if sizes else 0.0, queries

    def _best(self, errors: list[float], odd: Tensor, unseen: bool) -> int:
        """Number of the sigma to go to, or MORE."""
        best = min(range(len(errors)), key=lambda i: errors[i])
        if unseen:
            far = self._sigma >= FARTHEST * self._start
            return SIDE if far or not self._first else len(errors) - 1
        still = int((odd[:, best] == 0).sum())
        if not self._many and (errors[best] > UNCLEAR or 2 * still > len(odd)):
            return MORE
        return best if errors[best] < BETTER * errors[SIDE] else SIDE


def _without_steps(error: float) -> float:
    """Relative to the derivative alone; in the old order where no derivative is left."""
    return error / math.sqrt(1 - error**2) if error < LARGEST else error * WITHOUT


def _finite(run: Callable[..., Tensor]) -> RowResults:
    """Losses under noise that may be far too large: then they are as wrong as can be."""
    losses = run()
    return RowResults(losses.nan_to_num(nan=torch.finfo(losses.dtype).max / 4))
