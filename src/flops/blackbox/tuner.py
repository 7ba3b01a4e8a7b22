"""`Tuner`: minimises a black box with the estimators and allocators of the engine.

Somebody who can evaluate a function can use it: `ask` says which rows are wanted, `tell` takes
their losses, in any process, at any time. `step` and `run` do both with an objective at hand. A
step asks twice: for the clean losses of a batch, and for its queries.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Signal
from flops.allocators.equal import Equal
from flops.blackbox.ask_tell import PAUSE, Inquiry
from flops.blackbox.estimating import Options, VectorEstimator
from flops.blackbox.objective import Objective, Question
from flops.blackbox.order import Order
from flops.blackbox.outputs import Outputs
from flops.engine.allocation import check_allocators, floor_of, spending
from flops.engine.collectives import Team
from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work
from flops.engine.queries import Ledger, Queries
from flops.engine.report import ForwardEquivalents, StepReport
from flops.errors import FlopsError
from flops.estimators import LikelihoodRatio

SCHEMA = 1
AT_ONCE = 1 << 25  # noise values of one question, 128 MB
NAME = "parameters"

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Tuner(Inquiry):
    """Minimises the mean loss over points of which nothing but losses is known.

    Args:
        start: Parameters to start from, shape (d,).
        points: How many points there are; questions name them by 0, ..., points - 1.
        objective: ``losses = objective(parameters, points)``; None for `ask` and `tell` alone.
        estimator: `LikelihoodRatio`, `ES` or `SPSA`, with `shaping=Shaping()` for shaped noise.
        queries: Mean queries per point of a batch; the clean losses come on top.
        allocator: How a batch's queries are spread over its points.
        batch: Points of a step.
        learning_rate: Of Adam.
        optimizer: Makes another optimizer from a list of parameters.
        parts: Name and shape of each part of the vector, such as
            ``{"text": (12, 500), "image": (10, 500)}``: shaped noise learns positions and channels
            of each. One flat part if None.
        outputs: Of an objective whose answers show more than losses: shaped noise then remembers,
            from step to step, how the outputs of every point follow the parameters.
        embeddings: What the Gaussian allocator compares points by, shape (points, E).
        seed: Key of the noise and of the order of points.

    Attributes:
        parameters: As they are now, shape (d,).
        steps: Steps taken.
        asked: Rows answered so far, clean ones included.
        report: Of the last step.

    The mean of the estimate is the gradient of the loss smoothed by the noise; with ``outputs`` the
    outputs are smoothed, not the loss. Every row that is asked is counted.

    Raises:
        FlopsError: If the arguments do not fit together.
    """

    def __init__(
        self,
        start: Tensor,
        points: int,
        objective: Objective | None = None,
        *,
        estimator: Options | None = None,
        queries: float = 60.0,
        allocator: Allocator | None = None,
        batch: int = 64,
        learning_rate: float = 1e-4,
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
            raise FlopsError(f"need an embedding of each of the {points} points")
        shapes = parts or {NAME: tuple(start.shape)}
        if sum(torch.Size(shape).numel() for shape in shapes.values()) != len(start):
            raise FlopsError(f"the parts {shapes} do not add up to {len(start)} parameters")
        self.theta = nn.Parameter(start.detach().to("cpu", torch.float32, copy=True))
        options = estimator or LikelihoodRatio(sigma=1e-2)
        known = VectorEstimator(options, self.theta, tuple(shapes.items()), outputs)
        self._estimator = known
        self.group = ResolvedGroup(NAME, {}, (self.theta,), known, queries)
        least = known.unit
        if self.group.budget(1) < least:
            raise FlopsError(f"need at least {least} queries per point, not {queries}")
        allocators = {NAME: copy.deepcopy(allocator or Equal())}
        check_allocators([self.group], allocators)
        self.allocator = allocators[NAME]
        make = optimizer or (lambda p: torch.optim.Adam(p, learning_rate))
        self.optimizer = make([self.theta])
        self.points, self.batch, self.seed = points, min(batch, points), seed
        self.embeddings, self.memory = embeddings, dict[str, Any]()
        self.steps = 0
        self.report: StepReport | None = None
        self._chunk = max(2 * known.unit, AT_ONCE // len(start))

    @property
    def parameters(self) -> Tensor:
        """As they are now, shape (d,)."""
        return self.theta.detach().clone()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which every point comes once; the last may be short."""
        return self._order.steps_per_epoch

    def step_cost(self) -> int:
        """Rows that the next step asks for."""
        size = len(self._batch(self.steps))
        return size * self._estimator.reads_clean + self.group.budget(size)

    def step(self) -> StepReport:
        """Ask the objective for a step's rows, and take it."""
        before = self.steps
        while self.steps == before:
            self.tell(self.answer(self.ask()))
        assert self.report is not None
        return self.report

    def run(self, steps: int) -> Iterator[StepReport]:
        """Take so many steps."""
        for _ in range(steps):
            yield self.step()

    def work(self) -> Work[None]:
        """Steps without end, as questions."""
        while True:
            yield from self.stepping()
            yield PAUSE

    def stepping(self) -> Work[None]:
        """One step: yields questions, is sent their answers."""
        started, points = time.perf_counter(), self._batch(self.steps)
        size = len(points)
        answer = torch.full((size, 1), torch.nan)
        if self._estimator.reads_clean:
            # One vector for all rows: whoever answers has to prepare it once.
            answer = yield Question(self.theta.detach().clone().expand(size, -1), points, "clean")
        losses = answer[:, 0]
        key, memory, allocator = (self.seed, self.steps, 0), dict(self.memory), self.allocator
        allocator = copy.copy(allocator)
        ledger = Ledger()
        signal = Signal(
            losses,
            self.group.budget(size),
            self.group.estimator.unit,
            floor_of(allocator, self.group),
            NAME,
            points,
            None if self.embeddings is None else self.embeddings[points],
            key,
        )
        nobody: Any = None  # no model, hence no passes
        queries = Queries(
            NAME,
            nobody,
            {},
            losses,
            torch.zeros(size, dtype=torch.long),
            key,
            points.tolist(),
            self._chunk,
            ledger,
            memory,
            Team(),
        )
        spent = yield from spending(self.group, answer, allocator, signal, queries)
        self.theta.grad = spent.gradients[self.theta].to(self.theta)
        self.optimizer.step()
        self.optimizer.zero_grad()
        clean = float(size) if self._estimator.reads_clean else 0.0
        self.report = StepReport(
            loss=float(losses.mean()) if clean or spent.loss is None else spent.loss,
            queries=ledger.rows,
            forward_equivalents=ForwardEquivalents(clean, ledger.queries, 0.0, 0.0),
            counts={NAME: spent.counts},
            dropped={NAME: spent.dropped},
            snr={NAME: spent.signal_to_noise},
            seconds=time.perf_counter() - started,
            shaping={} if spent.shaping is None else {NAME: spent.shaping},
            cosine={},
        )
        self.memory, self.allocator = memory, allocator
        self.steps += 1

    def _batch(self, step: int) -> Tensor:
        return self._order.at(step)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, between two steps."""
        if self.waiting:
            raise FlopsError("a step is under way: tell its answer before taking the state")
        return {
            "schema": SCHEMA,
            "theta": self.parameters,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "allocator": copy.deepcopy(self.allocator.state_dict()),
            "memory": copy.deepcopy(self.memory),
            "seed": self.seed,
            "steps": self.steps,
            "asked": self.asked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            FlopsError: If the state is of another version or size.
        """
        if state.get("schema") != SCHEMA or state["theta"].shape != self.theta.shape:
            raise FlopsError("the state is of another version, or of another number of parameters")
        with torch.no_grad():
            self.theta.copy_(state["theta"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.allocator.load_state_dict(copy.deepcopy(state["allocator"]))
        self.memory = copy.deepcopy(dict(state["memory"]))
        self.seed, self.steps = int(state["seed"]), int(state["steps"])
        self._order = replace(self._order, seed=self.seed)
        self.restart(int(state["asked"]))
