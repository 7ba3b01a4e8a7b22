"""`Tuner`: black-box optimization in one call, with a journal, a budget and any executor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flops.allocators.base import Allocator
from flops.blackbox.drive import resume
from flops.blackbox.evaluator import PART, BudgetError, Evaluator
from flops.blackbox.failures import OnFailure
from flops.blackbox.gradient_steps import GradientSteps, OptimizerFactory
from flops.blackbox.journal import Journal
from flops.blackbox.journal_file import warn
from flops.blackbox.journal_settings import described
from flops.blackbox.objective import Candidates, NumpyObjective, Objective
from flops.blackbox.open_round import OpenRound
from flops.blackbox.outputs import Outputs
from flops.blackbox.requests import KeyedObjective, RequestObjective
from flops.blackbox.unrecorded import Unrecorded
from flops.engine.report import StepReport
from flops.errors import FlopsError
from flops.estimators import LikelihoodRatio
from flops.estimators.parameter_noise import ParameterNoise

CONCURRENCY = 8  # calls in flight at a time, of a given executor


class Tuner(GradientSteps):
    """Minimises the mean loss over points, given only losses.

    Args:
        start: Parameters to start from, a vector of floats, of torch or numpy. With a numpy array
            the objective is called with numpy arrays.
        objective: ``losses = objective(parameters, points)``; None to use `ask` and `tell` only.
        points: Number of points; candidates refer to them as 0, ..., points - 1. One for a metric
            of a whole data set.
        journal: File that records every row before it is used: a run that was interrupted goes on
            from its last snapshot, and no value is paid for twice. None keeps nothing.
        budget: Largest number of rows, over all processes of the run; None for no limit. Another
            process may give another one.
        price: Price of 1,000 rows, for `cost`.
        executor: Any `concurrent.futures.Executor` that evaluates the rows: threads, processes, or
            a cluster (`distributed.Client.get_executor()`). None evaluates in this thread.
        on_failure: Rows that raise, exceed their time or are not finite are retried, then left
            out; None for the defaults of `OnFailure`, "raise" to raise their errors instead.
        part: Rows of a call of the objective, at most; fixed for a run.
        concurrency: Calls in flight; None for one without an executor, else 8.
        estimator: `LikelihoodRatio`, `ES` or `SPSA`, with `shaping=Shaping()` for shaped noise.
        queries: Mean queries per point of a batch, not counting the clean losses.
        allocator: Distributes the queries of a batch over its points.
        batch: Points per step.
        learning_rate: Learning rate of Adam; None searches for it in the first steps and now and
            then later (`flops.blackbox.step_size`).
        optimizer: Factory of another optimizer, called with a list of parameters.
        parts: Name and shape of each part of the vector, such as
            ``{"text": (12, 500), "image": (10, 500)}``: shaped noise learns positions and channels
            of each. One flat part if None.
        outputs: For an objective that returns more than losses: shaped noise then estimates the
            Jacobian of every point's outputs from the queries of all steps, or, with
            ``Outputs(newest=0)``, learns the mean Jacobian of all points as the engine does.
        embeddings: Of the points, for the kernel of the Gaussian allocator, shape (points, E).
        seed: Seeds the noise and the order of points.
        say: Called with a sentence about each problem of the journal and its remedy.

    Attributes:
        parameters: Current parameters, shape (d,).
        steps: Steps taken.
        asked: Rows evaluated so far, including clean ones.
        report: Report of the last step.

    The expectation of the estimate is the gradient of the loss smoothed by the noise; with
    ``outputs`` the outputs are smoothed, not the loss. Every evaluated row is counted.

    Raises:
        FlopsError: If the arguments are inconsistent.
        JournalError: If the journal is of a run with other settings, which are named.
    """

    def __init__(
        self,
        start: Tensor | np.ndarray | Sequence[float],
        objective: Objective | KeyedObjective | RequestObjective | None = None,
        *,
        points: int = 1,
        journal: Path | str | None = None,
        budget: int | None = None,
        price: float | None = None,
        executor: Executor | None = None,
        on_failure: OnFailure | Literal["raise"] | None = None,
        part: int = PART,
        concurrency: int | None = None,
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
        say: Callable[[str], None] = warn,
    ) -> None:
        if isinstance(objective, int) or (objective is not None and not _evaluates(objective)):
            raise FlopsError(
                f"objective must be a function of (parameters, points), not {objective!r}; the "
                "number of points is the keyword `points`"
            )
        if isinstance(start, np.ndarray) and callable(objective) and not _keyed(objective):
            objective = NumpyObjective(objective)
        first = _vector(start)
        super().__init__(
            first,
            points=points,
            estimator=estimator,
            queries=queries,
            allocator=allocator,
            batch=batch,
            learning_rate=learning_rate,
            optimizer=optimizer,
            parts=parts,
            outputs=outputs,
            embeddings=embeddings,
            seed=seed,
        )
        if not (on_failure in (None, "raise") or isinstance(on_failure, OnFailure)):
            raise FlopsError(f'on_failure must be an OnFailure or "raise", not {on_failure!r}')
        if part < 1 or (concurrency is not None and concurrency < 1):
            raise FlopsError(f"part and concurrency must be at least 1: {part}, {concurrency}")
        if price is not None and price < 0:
            raise FlopsError(f"price must not be negative, not {price}")
        self.objective, self.price = objective, price
        self.on_failure = None if on_failure == "raise" else on_failure or OnFailure()
        kept: Journal = Unrecorded()
        if journal is not None:
            settings = {
                "start": hashlib.sha256(first.numpy().tobytes()).hexdigest()[:16],
                "parameters": len(first),
                "points": points,
                "estimator": described(estimator or LikelihoodRatio(sigma=1e-2)),
                "queries": queries,
                "allocator": described(self.allocator),
                "batch": batch,
                "learning_rate": learning_rate,
                "optimizer": type(self.optimizer).__name__,
                "parts": parts,
                "outputs": "mean" if outputs and not outputs.newest else outputs is not None,
                "embeddings": None if embeddings is None else list(embeddings.shape),
                "seed": seed,
                "part": part,
            }
            kept = Journal(journal, settings, say)
        self.evaluator = Evaluator(
            objective,
            kept,
            budget,
            part,
            concurrency or (1 if executor is None else CONCURRENCY),
            executor=executor,
            on_failure=self.on_failure,
        )
        self._opened: OpenRound | None = None
        self._snapshots = None
        if journal is not None:
            self._snapshots = resume(self, self.evaluator)

    def __repr__(self) -> str:
        size, name = len(self.parameters), type(self.group.estimator).__name__
        return f"Tuner({size} parameters, {self.points} points, {name}, steps={self.steps})"

    @property
    def budget(self) -> int | None:
        """Largest number of rows; may be raised or lowered at any time."""
        return self.evaluator.budget

    @budget.setter
    def budget(self, rows: int | None) -> None:
        self.evaluator.budget = rows

    @property
    def spent(self) -> int:
        """Rows paid for so far, by all processes of the run."""
        return self.evaluator.spent

    @property
    def cost(self) -> float | None:
        """Their price; None without one."""
        return None if self.price is None else self.spent / 1000 * self.price

    @property
    def failures(self) -> list[tuple[int, int, int, str]]:
        """Rows that were left out: round, row, point and reason."""
        return self.evaluator.journal.failures()

    def step(self) -> StepReport:
        """Take one step, with the objective.

        Raises:
            BudgetError: If the budget does not cover it.
            FailureError: If too many rows failed.
        """
        before = self.steps
        if not self._affords():
            raise BudgetError(
                f"the budget of {self.budget:,} rows does not cover a step of "
                f"{self.step_cost():,} after {self.spent:,}"
            )
        while self.steps == before:
            if len(self._open()):
                self._evaluate()
            else:
                self._complete()
        assert self.report is not None
        return self.report

    def run(self, steps: int | None = None, *, until: int | None = None) -> Iterator[StepReport]:
        """Take steps, as far as the budget reaches.

        Args:
            steps: This many more.
            until: Up to this many in total: the rest of a run that was interrupted.

        Yields:
            The report of each step.
        """
        if steps is None and until is None and self.budget is None:
            raise FlopsError("give the number of steps, or the Tuner a budget")
        last = until if steps is None else self.steps + steps
        while (last is None or self.steps < last) and self._affords():
            yield self.step()

    def ask(self) -> Candidates:
        """Candidates to evaluate next, without rows whose values were told or are recorded.

        Raises:
            BudgetError: If the budget does not cover them.
        """
        while len(missing := self._open()) == 0:
            self._complete()
        return missing

    def close(self) -> None:
        """Close the journal."""
        self.evaluator.journal.close()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restart(self, asked: int = 0) -> None:
        """Drop pending work and start again, with ``asked`` rows evaluated before."""
        super().restart(asked)
        self._opened = None
        if hasattr(self, "evaluator"):
            self.evaluator.rows = asked

    def _affords(self) -> bool:
        """Whether the next step is paid for: by the budget, or because it is recorded or begun."""
        if self.budget is None or self.waiting or self.recorded():
            return True
        return self.spent + self.step_cost() <= self.budget

    def _open(self) -> Candidates:
        """The rows of the pending round that are neither told nor recorded."""
        super().ask()
        assert self._pending is not None
        assert self._missing is not None
        if self._opened is None:
            self._opened = self.evaluator.open(self._pending)
            self.evaluator.begin(self._opened)
            if self._opened.known:
                self._missing = self._pending.take(self._opened.missing())
        return self._missing

    def _evaluate(self) -> None:
        """Evaluate the rest of the pending round with the objective."""
        assert self._pending is not None
        assert self._opened is not None
        self.evaluator.objective = self.objective
        try:
            self.evaluator.request(self._opened)
        finally:
            self._missing = self._pending.take(self._opened.missing())
        self._complete()

    def _arrived(self, rows: Tensor, columns: Tensor) -> None:
        assert self._opened is not None
        self.evaluator.keep(self._opened, rows, columns)
        self._remove(rows)

    def _left_out(self, row: int, why: str) -> None:
        assert self._opened is not None
        try:
            self.evaluator.fail(self._opened, row, why)
        except FlopsError:
            del self._opened.failed[row]
            raise
        self._remove(torch.tensor([row]))

    def _complete(self) -> None:
        if self._missing is None or len(self._missing):
            return
        assert self._opened is not None
        opened, self._opened = self._opened, None
        columns = self.evaluator.close(opened)
        self.advance(columns)
        if self._snapshots is not None and not self.waiting:
            self._snapshots.offer(self.evaluator.number)


def _vector(start: Tensor | np.ndarray | Sequence[float]) -> Tensor:
    found = start if isinstance(start, Tensor) else torch.as_tensor(np.asarray(start))
    if found.dim() == 1 and len(found) and found.is_floating_point():
        return found.detach().to("cpu", torch.float32)
    return found


def _keyed(objective: Any) -> bool:
    return isinstance(objective, KeyedObjective | RequestObjective)


def _evaluates(objective: Any) -> bool:
    return callable(objective) or _keyed(objective)
