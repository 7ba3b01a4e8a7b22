"""Steps of the engine's estimators and allocators on a black box, by ask and tell.

A step has two rounds or more: the clean losses of a batch, then its queries; if the step size is
chosen by the run, some steps also evaluate a few rates (`flops.blackbox.step_size`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Signal
from flops.allocators.equal import Equal
from flops.blackbox.ask_tell import PAUSE, AskTell, Work
from flops.blackbox.jacobian_memory import RecycledLikelihoodRatio
from flops.blackbox.objective import Candidates, Objective
from flops.blackbox.order import Order
from flops.blackbox.outputs import Outputs
from flops.blackbox.step_size import MOST, LineSearch, StepSize, due
from flops.blackbox.vector import Vector, VectorEngine
from flops.engine.gradients import Collector
from flops.engine.group_step import GroupStep, budget_of, floor_of
from flops.engine.groups import check_allocators
from flops.engine.report import StepReport
from flops.engine.rows import Cost, ForwardEquivalents, LocalRunner
from flops.engine.step import QueryLoop
from flops.errors import FlopsError
from flops.estimators import LikelihoodRatio
from flops.estimators.base import Estimator, Queries, RowResults
from flops.estimators.likelihood_ratio import default_sigma
from flops.estimators.parameter_noise import ParameterNoise
from flops.estimators.variance import ENERGY_STEPS
from flops.passes.ranks import Ranks
from flops.subspace.config import Shaping

SCHEMA = 3  # also counts streams of noise: that of earlier queries is made again
AT_ONCE = 1 << 25  # noise values per round, 128 MB
NAME = "parameters"

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class GradientSteps(AskTell):
    """Minimises the mean loss over points, given only losses; see `Tuner` for the arguments."""

    def __init__(
        self,
        start: Tensor,
        objective: Objective | None = None,
        *,
        points: int = 1,
        estimator: LikelihoodRatio | ParameterNoise | None = None,
        queries: float = 60.0,
        allocator: Allocator | None = None,
        batch: int = 64,
        learning_rate: float | None = None,
        optimizer: OptimizerFactory | None = None,
        parts: dict[str, tuple[int, ...]] | None = None,
        outputs: Outputs | None = None,
        embeddings: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(objective)
        if start.dim() != 1 or len(start) == 0 or not start.is_floating_point():
            raise FlopsError(f"start must be a vector of floats, not of shape {tuple(start.shape)}")
        self._order = Order(points, batch, seed)
        if embeddings is not None and len(embeddings) != points:
            raise FlopsError(f"embeddings must have one row for each of the {points} points")
        shapes = parts or {NAME: tuple(start.shape)}
        if sum(torch.Size(shape).numel() for shape in shapes.values()) != len(start):
            raise FlopsError(f"the parts {shapes} do not add up to {len(start)} parameters")
        self._vector, self._outputs = Vector(start, shapes), outputs
        options = estimator or LikelihoodRatio(sigma=1e-2)
        chosen = _on_identity(options, outputs)
        stores = outputs is None or outputs.newest > 0
        self._withholds = not stores and (options.shaping or Shaping()).withhold > 0
        self._engine = VectorEngine(self._vector, chosen, queries, NAME)
        self.group = self._engine.group
        if budget_of(self.group, 1) < chosen.unit:
            raise FlopsError(f"need at least {chosen.unit} queries per point, not {queries}")
        allocators = {NAME: copy.deepcopy(allocator or Equal())}
        check_allocators([self.group], allocators)
        self.allocator = allocators[NAME]
        self.step_size: StepSize | None = None
        if optimizer is None and learning_rate is None:
            assert isinstance(chosen.sigma, float)
            self.step_size = StepSize(chosen.sigma)
        elif learning_rate is not None and not learning_rate > 0:
            raise FlopsError(f"learning_rate must be positive, not {learning_rate}")
        make = optimizer or (lambda p: torch.optim.Adam(p, learning_rate or 1.0))
        self.optimizer = make(list(self._vector.parameters()))
        self.points, self.batch, self.seed = points, min(batch, points), seed
        self.embeddings, self.memory = embeddings, dict[str, Any]()
        self.steps = 0
        self.report: StepReport | None = None
        self._chunk = max(2 * chosen.unit, AT_ONCE // len(start))

    @property
    def parameters(self) -> Tensor:
        """Current parameters, shape (d,)."""
        return self._vector.flat

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch; the last may be short."""
        return self._order.steps_per_epoch

    def step_cost(self) -> int:
        """Rows that the next step evaluates, at most."""
        size = len(self._batch(self.steps))
        search = 0
        if self.step_size is not None and due(self.steps):
            search = (1 + MOST) * len(self._batch(self.steps + 1))
        return size * self.group.estimator.reads_clean + budget_of(self.group, size) + search

    def work(self) -> Work[None]:
        """An endless sequence of steps."""
        while True:
            yield from self.stepping()
            yield PAUSE

    def stepping(self) -> Work[None]:
        """One step: yields candidates, is sent their values."""
        started, points = time.perf_counter(), self._batch(self.steps)
        reads_clean = self.group.estimator.reads_clean
        clean, asked, failed = torch.full((len(points), 1), torch.nan), 0, 0
        if reads_clean:
            asked = len(points)
            clean, points = yield from self._clean(points)
            failed = asked - len(points)
        size = len(points)
        losses, key = clean[:, 0], (self.seed, self.steps, 0)
        memory, allocator = dict(self.memory), copy.copy(self.allocator)
        size_of_all = float(len(self.parameters))  # |D|_F^2 of an identity
        memory["jacobian_energy"] = (ENERGY_STEPS * size_of_all, ENERGY_STEPS)
        signal = Signal(
            losses,
            budget_of(self.group, size),
            self.group.estimator.unit,
            floor_of(allocator, self.group),
            NAME,
            points,
            None if self.embeddings is None else self.embeddings[points],
            key,
        )
        none = torch.zeros(size, dtype=torch.long)
        view = None if self._outputs is None else self._outputs.view(clean, points)
        queries = Queries(
            NAME, size, losses, none, key, points.tolist(), memory, view=view, decide=self.decide
        )

        def runner(cost: Cost) -> LocalRunner:
            # One chunk for the batch: its sum must not depend on the chunks of queries.
            return self._engine.runner(points, max(self._chunk, size), cost)

        step = GroupStep(self.group, self._engine.binding, allocator, signal, queries, runner)
        loop = QueryLoop([step], size, self._chunk, Ranks())
        while (query := loop.next()) is not None:
            rows = self._engine.rows(query, self.group.estimator.shared)
            columns = yield Candidates(rows, points[query.rows.points])
            failed += int(torch.isnan(columns[:, 0]).sum())
            results = RowResults(columns[:, 0])
            if self._outputs is not None and view is not None:
                results = self._outputs.results(columns, view)
            loop.tell(query, results)
        found, withheld = Collector(), step.estimation.withheld
        if self._withholds and self.decide is not None:  # what is asked next depends on it
            withheld = self.decide("withheld", withheld)
        step.write(found)
        for parameter, gradient in found.gradients.items():
            parameter.grad = None if withheld else gradient.to(parameter)
        sizes = self.step_size
        if sizes is not None and (due(self.steps) or sizes.rate is None) and not withheld:
            yield from self._search(sizes, points, losses)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        shaping = step.shaping
        if shaping is not None:
            sites = (replace(site, site=self._vector.name(site.site)) for site in shaping.sites)
            shaping = replace(shaping, sites=tuple(sites))
        cost = ForwardEquivalents(float(asked), step.cost.queries)
        self.report = StepReport(
            loss=float(losses.mean()) if reads_clean or step.loss is None else step.loss,
            queries=step.cost.rows,
            forward_equivalents=cost,
            counts={NAME: step.counts},
            dropped={NAME: step.dropped},
            snr={NAME: step.snr},
            seconds=time.perf_counter() - started,
            shaping={} if shaping is None else {NAME: shaping},
            cosine={},
            failed=failed,
            points=size,
        )
        self.memory, self.allocator = memory, allocator
        self.steps += 1

    def _batch(self, step: int) -> Tensor:
        return self._order.at(step)

    def _clean(self, points: Tensor, kind: str = "clean") -> Work[tuple[Tensor, Tensor]]:
        """Columns at the current parameters, and their points, without those that failed."""
        # One vector for all rows: an evaluator serializes it once.
        columns = yield Candidates(self.parameters.expand(len(points), -1), points, kind)
        there = torch.nonzero(~torch.isnan(columns[:, 0])).flatten()
        if len(there) == 0:
            raise FlopsError("every clean loss of a batch failed: there is nothing to step from")
        return (columns, points) if len(there) == len(points) else (columns[there], points[there])

    def _search(self, sizes: StepSize, points: Tensor, losses: Tensor) -> Work[None]:
        """Step with the best rate along the optimizer's update, and choose that of later steps."""
        self._set_rate(1.0)
        before = self.parameters
        self.optimizer.step()
        update = self.parameters - before
        self._vector.load(before)
        following = self._batch(self.steps + 1)
        if not self.group.estimator.reads_clean or set(following.tolist()) != set(points.tolist()):
            columns, points = yield from self._clean(following, "rate")
            losses = columns[:, 0]
        search = LineSearch(sizes.guess)
        rates = search.rates()
        try:
            rate = next(rates)
            while True:
                vector = before + rate * update
                columns = yield Candidates(vector.expand(len(points), -1), points, "rate")
                rate = rates.send((columns[:, 0] - losses).double())
        except StopIteration as found:
            best = found.value
        rate = sizes.update(best)
        self._set_rate(rate)
        self._vector.load(before + rate * update)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, taken between two steps."""
        if self.waiting:
            raise FlopsError(
                "a step is in progress: tell the pending values before taking the state"
            )
        return {
            "schema": SCHEMA,
            "theta": self.parameters,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "allocator": copy.deepcopy(self.allocator.state_dict()),
            "memory": copy.deepcopy(self.memory),
            "seed": self.seed,
            "steps": self.steps,
            "asked": self.asked,
            "step_size": None if self.step_size is None else self.step_size.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            FlopsError: If the state is of another version or size.
        """
        if state.get("schema") != SCHEMA or state["theta"].shape != self.parameters.shape:
            raise FlopsError("the state is of another version or has another number of parameters")
        self._vector.load(state["theta"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.allocator.load_state_dict(copy.deepcopy(state["allocator"]))
        self.memory = copy.deepcopy(dict(state["memory"]))
        self.seed, self.steps = int(state["seed"]), int(state["steps"])
        if self.step_size is not None and state.get("step_size") is not None:
            self.step_size.load_state_dict(state["step_size"])
        self._order = replace(self._order, seed=self.seed)
        self.restart(int(state["asked"]))


def _on_identity(options: LikelihoodRatio | ParameterNoise, outputs: Outputs | None) -> Estimator:
    """The estimator on an identity, where per-row noise on parameters is noise on outputs."""
    if not isinstance(options, LikelihoodRatio | ParameterNoise):
        raise FlopsError(f"Tuner supports LikelihoodRatio, ES and SPSA, not {options!r}")
    if isinstance(options, ParameterNoise):
        if options.shared:
            if outputs is not None:
                raise FlopsError("outputs need per-point draws: use shared=False")
            return options
        options = LikelihoodRatio(
            options.sigma, "block", options.used_baseline, options.kind, options.shaping
        )
    if options.sigma == "auto":
        raise FlopsError(
            'sigma="auto" spends queries that a price does not know of; give Tuner a number'
        )
    options = replace(options, targets="block", sigma=options.sigma or default_sigma(torch.float32))
    if outputs is None:
        return options
    if not options.reads_outputs:
        raise FlopsError(
            "outputs need shaped noise that learns from them: give the estimator "
            "shaping=Shaping(), with outputs=True, the default"
        )
    return RecycledLikelihoodRatio.of(options, outputs) if outputs.newest else options
