"""Ask and tell: work that yields questions, driven by whoever can answer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flops.blackbox.objective import Objective, Question, checked
from flops.engine.meetings import Decision, Work
from flops.errors import FlopsError
from flops.passes.interrupts import Hold, Whole

PAUSE = object()
"""Yielded where everything that was told is taken in and nothing new is asked yet."""


class Inquiry:
    """Something that asks: `work` yields questions and is sent answers, shape (Q, k), losses first.

    Attributes:
        asked: Rows that were answered so far.
        decide: Told name and value of each discrete decision; returns the one that counts, which
            may be that of an earlier process (`Answering.decide`).
    """

    def __init__(self, objective: Objective | None = None) -> None:
        if objective is not None and not callable(objective):
            raise FlopsError(f"objective must be a function of (parameters, points): {objective!r}")
        self.objective, self.asked = objective, 0
        self.decide: Callable[[str, Any], Any] = _as_it_is
        self._pending: Question | None = None
        self._work: Work[None] | None = None
        self._failed: BaseException | None = None
        self._done = False

    def work(self) -> Work[None]:
        """Questions, one after the other."""
        raise NotImplementedError

    @property
    def waiting(self) -> bool:
        """Whether a question waits for its answer."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """Whether there is nothing more to ask."""
        return self._done

    def ask(self) -> Question:
        """The rows that are wanted next; the same ones until they are told.

        Raises:
            FlopsError: If there is nothing more to ask (see `done`).
        """
        if self._failed is not None:
            raise FlopsError(
                f"this stopped with an error ({self._failed}); start anew from the last state"
            ) from self._failed
        while self._pending is None and not self._done:  # past a pause
            with Hold(), Whole():
                self._advance(None)
        if self._pending is None:
            raise FlopsError("there is nothing more to ask")
        return self._pending

    def tell(self, answer: Tensor) -> None:
        """The answer to the last question: losses (Q,), or columns with the losses first.

        Raises:
            ObjectiveError: If it is not one finite loss for each row; ask again then.
        """
        if self._pending is None:
            raise FlopsError("nothing was asked: call ask() first")
        columns = checked(answer, self._pending)
        with Hold(), Whole():  # Ctrl-C comes before it or after it
            self.asked += len(self._pending)
            self._pending = None
            self._advance(columns)

    def answer(self, question: Question) -> Tensor:
        """Ask the objective."""
        if self.objective is None:
            raise FlopsError("no objective was given: use ask() and tell()")
        return self.objective(question.parameters, question.points)

    def restart(self, asked: int = 0) -> None:
        """Begin anew, with so many rows answered before."""
        self.asked = asked
        self._pending = self._work = self._failed = None
        self._done = False

    def _advance(self, sent: Tensor | None) -> None:
        """On to the next question or pause; stops with nothing are for processes that meet."""
        if self._work is None:
            self._work = self.work()
        try:
            found = self._work.send(sent)
            while found is None or isinstance(found, Decision):
                decision = None if found is None else self.decide(found.name, found.value)
                found = self._work.send(decision)
        except StopIteration:
            self._done = True
        except BaseException as error:
            self._failed = error
            raise
        else:
            self._pending = None if found is PAUSE else found


def _as_it_is(name: str, value: Any) -> Any:
    return value
