"""The ask/tell interface: `ask` returns candidates to evaluate, `tell` takes their values."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from torch import Tensor

from flops.blackbox.objective import Candidates, Objective, checked
from flops.errors import FlopsError
from flops.passes.interrupts import Atomic, DeferSignals
from flops.subspace.step import Decide

T = TypeVar("T")
Work = Generator[Any, Any, T]
"""Yields `Candidates` and is sent their values; returns its result."""

PAUSE = object()
"""Yielded between two steps: all values have been used, and no candidates are pending."""


class AskTell:
    """Base class of optimizers: `work` yields candidates and is sent their values (Q, k).

    Attributes:
        asked: Rows evaluated so far.
        decide: Called with the name and value of each discrete decision; returns the value to use,
            which may have been recorded by an earlier process (`Evaluator.decide`).
    """

    def __init__(self, objective: Objective | None = None) -> None:
        if objective is not None and not callable(objective):
            raise FlopsError(f"objective must be a function of (parameters, points): {objective!r}")
        self.objective, self.asked = objective, 0
        self.decide: Decide | None = None
        self._pending: Candidates | None = None
        self._work: Work[None] | None = None
        self._failed: BaseException | None = None
        self._done = False

    def work(self) -> Work[None]:
        """All candidates, batch by batch."""
        raise NotImplementedError

    @property
    def waiting(self) -> bool:
        """Whether candidates are pending."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """Whether there is nothing left to evaluate."""
        return self._done

    def ask(self) -> Candidates:
        """Candidates to evaluate next; the same ones until `tell` has their values.

        Raises:
            FlopsError: If nothing is left to evaluate (see `done`).
        """
        if self._failed is not None:
            raise FlopsError(
                f"an earlier step failed ({self._failed}); load the last state to continue"
            ) from self._failed
        while self._pending is None and not self._done:  # past a pause
            with DeferSignals(), Atomic():
                self._advance(None)
        if self._pending is None:
            raise FlopsError("nothing is left to evaluate")
        return self._pending

    def tell(self, values: Tensor) -> None:
        """Pass the values of the last candidates: losses (Q,), or columns with the losses first.

        Raises:
            ObjectiveError: If they are not one finite loss per row; the candidates stay pending.
        """
        if self._pending is None:
            raise FlopsError("no candidates are pending: call ask() first")
        columns = checked(values, self._pending)
        with DeferSignals(), Atomic():  # Ctrl-C takes effect before or after, not in between
            self.asked += len(self._pending)
            self._pending = None
            self._advance(columns)

    def evaluate(self, candidates: Candidates) -> Tensor:
        """Evaluate candidates with the objective."""
        if self.objective is None:
            raise FlopsError("no objective was given: use ask() and tell()")
        return self.objective(candidates.parameters, candidates.points)

    def restart(self, asked: int = 0) -> None:
        """Drop pending work and start again, with ``asked`` rows evaluated before."""
        self.asked = asked
        self._pending = self._work = self._failed = None
        self._done = False

    def _advance(self, sent: Tensor | None) -> None:
        """Run to the next candidates or pause."""
        if self._work is None:
            self._work = self.work()
        try:
            found = self._work.send(sent)
        except StopIteration:
            self._done = True
        except BaseException as error:
            self._failed = error
            raise
        else:
            self._pending = None if found is PAUSE else found
