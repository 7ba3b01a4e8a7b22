"""A tuning run: epochs of steps, validation after each, early stopping, one test evaluation.

All evaluations go through ask/tell, and every step ends in a pause with a state from which the run
can continue, so that a journal can hold the whole run. How long it is (epochs, patience, budget)
does not change what is asked before its end: it may go on with other limits, and steps that are
recorded are always taken. Only the evaluations at its end (the test, and the validation of an epoch
that was not completed) are then made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flops.blackbox.ask_tell import PAUSE, AskTell, Work
from flops.blackbox.evaluator import BudgetError
from flops.blackbox.objective import Candidates
from flops.errors import FlopsError
from flops.subspace.step import Decide

SCHEMA = 1


class Stepper(Protocol):
    """Takes steps: `Tuner`, `CMAES`, backpropagation."""

    steps: int
    decide: Decide | None

    @property
    def parameters(self) -> Tensor:
        """Current parameters."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch."""
        ...

    def step_cost(self) -> int:
        """Rows that the next step evaluates."""
        ...

    def stepping(self) -> Work[None]:
        """One step: yields candidates, is sent their values."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, taken between two steps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        ...


@dataclass(frozen=True)
class SplitIndices:
    """Positions of the three splits in the data set."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass
class TuningProgress:
    """State of a run after an epoch.

    Attributes:
        epoch: Completed epochs.
        steps: Completed steps.
        asked: Rows evaluated.
        validation_loss: After the last epoch.
        validation_accuracy: After the last epoch, in per cent.
    """

    epoch: int
    steps: int
    asked: int
    validation_loss: float
    validation_accuracy: float


@dataclass
class Tuning(AskTell):
    """Tune on the training points, keep the best by validation loss, test it once.

    Args:
        stepper: Takes the steps; None tests the parameters as they are.
        start: Parameters to start from, shape (d,).
        points: The splits.
        epochs: Largest number of epochs.
        patience: Stop after this many epochs without a better validation loss; 0 never stops.
        budget: Largest number of rows, validation and test included; None for no limit.
        embed: Called with the logits of the training points at the start, for allocators.
        notify: Called after each epoch.

    Attributes:
        history: One entry for the start and each epoch.
        best: Parameters with the best validation loss.
        stopped: Why it ended: "epochs", "patience" or "budget".
        test_loss: Of the best parameters, NaN before the end.
        test_accuracy: Of the best parameters, in per cent.
    """

    stepper: Stepper | None
    start: Tensor
    points: SplitIndices
    epochs: int = 50
    patience: int = 10
    budget: int | None = None
    embed: Callable[[Tensor], None] | None = None
    notify: Callable[[TuningProgress], None] | None = None
    history: list[TuningProgress] = field(default_factory=list, init=False)
    stopped: str = field(default="", init=False)
    test_loss: float = field(default=float("nan"), init=False)
    test_accuracy: float = field(default=float("nan"), init=False)
    _epoch: int = field(default=0, init=False)
    _taken: int = field(default=0, init=False)  # steps of this epoch
    _waited: int = field(default=0, init=False)  # epochs since the best
    _least: float = field(default=float("inf"), init=False)
    _embedded: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Initialise the counters."""
        AskTell.__init__(self)
        self.best = self.start

    def work(self) -> Work[None]:
        """All candidates of the rest of the run."""
        self._check_budget()
        if self.stepper is not None:
            self.stepper.decide = self.decide
        if self.embed is not None and self._embedded is None:
            seen = yield self._all(self.start, self.points.train, "embed")
            self._embedded = seen[:, 2:]
            self.embed(self._embedded)
            yield PAUSE
        if not self.history:
            self._least = yield from self._validate(0)
            yield PAUSE
        while self.stepper is not None and not self.stopped:
            if self._epoch >= self.epochs and not self.recorded():  # what is paid for is used
                break
            if self._taken < self.stepper.steps_per_epoch:
                if self._affords(self.stepper.step_cost()):
                    yield from self.stepper.stepping()
                    self._taken += 1
                    yield PAUSE
                    continue
                self.stopped = "budget"
                if not self._taken:  # already validated, and the budget still covers the test
                    break
            self._epoch, self._taken = self._epoch + 1, 0
            loss = yield from self._validate(self._epoch, ending=bool(self.stopped))
            if loss < self._least:
                self._least, self._waited, self.best = loss, 0, self.stepper.parameters
            else:
                self._waited += 1
            waited = bool(self.patience) and self._waited >= self.patience
            if not self.stopped:  # a larger budget continues from the last state
                yield PAUSE
                if waited and not self.recorded():
                    self.stopped = "patience"
        self.stopped = self.stopped or "epochs"
        seen = yield self._all(self.best, self.points.test, "test", ending=True)
        self.test_loss, self.test_accuracy = _mean(seen)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, taken at a pause."""
        return {
            "schema": SCHEMA,
            "epoch": self._epoch,
            "taken": self._taken,
            "waited": self._waited,
            "least": self._least,
            "history": [asdict(entry) for entry in self.history],
            "best": self.best.clone(),
            "embedded": self._embedded,
            "asked": self.asked,
            "stepper": None if self.stepper is None else self.stepper.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            FlopsError: If the state is of another version.
        """
        if state.get("schema") != SCHEMA:
            raise FlopsError(
                f"the state has schema {state.get('schema')}; this version reads {SCHEMA}"
            )
        if self.stepper is not None:
            self.stepper.load_state_dict(state["stepper"])
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._waited, self._least = int(state["waited"]), float(state["least"])
        self.history = [TuningProgress(**entry) for entry in state["history"]]
        self.best, self._embedded = state["best"], state["embedded"]
        if self.embed is not None and self._embedded is not None:
            self.embed(self._embedded)
        self.restart(int(state["asked"]))
        if self.notify is not None and self.history:
            self.notify(self.history[-1])

    def _check_budget(self) -> None:
        """Raise before anything is evaluated if the budget does not reach the test."""
        least = len(self.points.validation) + len(self.points.test)
        least += 0 if self.embed is None else len(self.points.train)
        if self.asked + self.overhead():  # of a run that goes on, the evaluator knows the price
            return
        if self.budget is not None and self.budget < least:
            raise BudgetError(
                f"the budget of {self.budget:,} queries does not cover one evaluation of the "
                f"validation and test points, which takes {least:,}"
            )

    def _affords(self, step: int) -> bool:
        """Whether the budget covers a step, its validation and the test, or it is paid for."""
        if self.budget is None or self.recorded():
            return True
        reserve = len(self.points.validation) + len(self.points.test)
        return self.asked + self.overhead() + step + reserve <= self.budget

    def _validate(self, epoch: int, ending: bool = False) -> Work[float]:
        now = self.start if self.stepper is None else self.stepper.parameters
        seen = yield self._all(now, self.points.validation, "validation", ending)
        loss, accuracy = _mean(seen)
        steps = 0 if self.stepper is None else self.stepper.steps
        # These rows are already counted in `asked`.
        self.history.append(TuningProgress(epoch, steps, self.asked, loss, accuracy))
        if self.notify is not None:
            self.notify(self.history[-1])
        return loss

    def _all(
        self, parameters: Tensor, points: Tensor, kind: str, ending: bool = False
    ) -> Candidates:
        return Candidates(parameters.expand(len(points), -1), points, kind, ending)


def _mean(seen: Tensor) -> tuple[float, float]:
    """Mean loss, and accuracy in per cent (NaN if the objective does not return it)."""
    seen = seen[~torch.isnan(seen[:, 0])]  # without rows that failed
    hits = seen[:, 1] if seen.size(1) > 1 else torch.full((1,), torch.nan)
    return float(seen[:, 0].double().mean()), 100 * float(hits.double().mean())
