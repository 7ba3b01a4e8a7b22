"""Answers to questions: from the journal where they are, else asked for, kept, and then used.

A question is cut into parts, each asked for under a key of its own that never changes: a service
that has seen the key gives its answer again, free. Parts are asked side by side; whatever comes
back is kept at once, also when another one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flops.blackbox.inquiry import Inquiry
from flops.blackbox.journal import Answer, Journal, JournalError
from flops.blackbox.objective import Objective, Question, checked
from flops.errors import FlopsError

PART = 256  # rows of a request


class BudgetError(FlopsError):
    """The budget does not pay for the next rows."""


@runtime_checkable
class KeyedObjective(Protocol):
    """An objective that takes a key for each request, and says what it cost."""

    def answer(self, question: Question, key: str) -> Answer:
        """Answer under a key; asking again under it must be free."""
        ...


@dataclass
class Answering:
    """Answers questions in turn, each row paid for once.

    Args:
        objective: Whom to ask.
        journal: Where answers are kept.
        budget: Most rows of the run; None for no limit.
        part: Rows of one request. It is part of a run: other cuts are other requests.
        concurrency: Requests at a time.
        notify: Told the number of rows whenever some were answered.

    Attributes:
        number: Questions answered so far.
        rows: Rows answered so far, from the journal or not.
    """

    objective: Objective | KeyedObjective
    journal: Journal
    budget: int | None = None
    part: int = PART
    concurrency: int = 1
    notify: Callable[[int], None] | None = None
    number: int = field(default=0, init=False)
    rows: int = field(default=0, init=False)

    def answer(self, question: Question) -> Tensor:
        """Columns of all rows, shape (Q, k).

        Raises:
            BudgetError: Before anything is asked, if the budget does not pay for the question.
            JournalError: If the journal has the answer to another question in this place.
        """
        if self.budget is not None and self.rows + len(question) > self.budget:
            raise BudgetError(
                f"the budget of {self.budget:,} queries does not pay for {len(question):,} more "
                f"after {self.rows:,}"
            )
        before = self.rows
        try:
            return self._answer(question)
        except BaseException:  # whoever asks again starts from here
            self.rows = before
            raise

    def _answer(self, question: Question) -> Tensor:
        starts = range(0, len(question), self.part)
        parts = [question.part(i, min(i + self.part, len(question))) for i in starts]
        digests = [part.digest() for part in parts]
        found: dict[int, Answer] = {}
        for place, (digest, answer) in self.journal.known(self.number).items():
            if place >= len(parts) or digest != digests[place]:
                raise JournalError(
                    f"question {self.number} is not the one that the journal answers: the run was "
                    "started with other data, another version, or on another kind of machine"
                )
            found[place] = answer
            self._note(len(parts[place]))
        self._missing(parts, digests, found)
        self.number += 1
        return torch.cat([found[place].columns for place in range(len(parts))])

    def _missing(
        self, parts: list[Question], digests: list[bytes], found: dict[int, Answer]
    ) -> None:
        waiting: dict[Future[Answer], int] = {}
        todo = [place for place in range(len(parts)) if place not in found]
        error: BaseException | None = None
        if not todo:
            return
        with ThreadPoolExecutor(min(self.concurrency, len(todo)), "ask") as pool:
            while (todo and error is None) or waiting:
                while todo and error is None and len(waiting) < self.concurrency:
                    place = todo.pop(0)
                    key = f"{self.journal.run}-{self.number}-{place}"
                    waiting[pool.submit(self._ask, parts[place], key)] = place
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    place = waiting.pop(future)
                    if (failure := future.exception()) is not None:
                        error = error or failure
                        continue
                    found[place] = future.result()
                    self.journal.write(self.number, place, digests[place], found[place])
                    self._note(len(parts[place]))
        if error is not None:
            raise error

    def _ask(self, question: Question, key: str) -> Answer:
        if isinstance(self.objective, KeyedObjective):
            answer = self.objective.answer(question, key)
            return Answer(checked(answer.columns, question), answer.cost)
        return Answer(checked(self.objective(question.parameters, question.points), question))

    def _note(self, rows: int) -> None:
        self.rows += rows
        if self.notify is not None:
            self.notify(rows)


def drive(inquiry: Inquiry, answering: Answering) -> None:
    """Ask and tell until there is nothing more to ask."""
    while not inquiry.done:
        inquiry.tell(answering.answer(inquiry.ask()))
