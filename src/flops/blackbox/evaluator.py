"""Answers to questions: from the journal where they are, else asked for, kept, and then used.

A question is cut into parts, each asked for under a key of its own that never changes: a service
that has seen the key gives its answer again, free. What is sent stands in the journal before, byte
by byte, so that whoever asks again, on whatever machine, sends the same. Parts are asked side by
side; whatever comes back is kept at once, also when another one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flops.blackbox.ask_tell import Inquiry
from flops.blackbox.journal import Answer, Journal, JournalError, Kept, Plan, Request
from flops.blackbox.objective import Objective, Question, checked
from flops.blackbox.snapshots import SHARE, Snapshots
from flops.errors import FlopsError
from flops.serve.codec import WireError, decode, encode

PART = 256  # rows of a request


class BudgetError(FlopsError):
    """The budget does not pay for the next rows."""


@runtime_checkable
class KeyedObjective(Protocol):
    """An objective that takes a key for each request, and says what it cost."""

    def answer(self, question: Question, key: str) -> Answer:
        """Answer under a key; asking again under it must be free."""
        ...


@runtime_checkable
class RequestObjective(Protocol):
    """An objective that sends bytes: it makes them once, and may have to send them again."""

    def prepare(self, question: Question, key: str) -> Sequence[Request]:
        """The requests of a question, each under a key that begins with this one."""
        ...

    def send(self, question: Question, requests: Sequence[Request]) -> Answer:
        """Send them as they are.

        The parameters of the question may differ in their last bits from those in the requests.
        """
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

    objective: Objective | KeyedObjective | RequestObjective
    journal: Journal
    budget: int | None = None
    part: int = PART
    concurrency: int = 1
    notify: Callable[[int], None] | None = None
    number: int = field(default=0, init=False)
    rows: int = field(default=0, init=False)
    _kept: Kept | None = field(default=None, init=False)
    _decisions: list[tuple[str, Any]] = field(default_factory=list, init=False)

    def answer(self, question: Question) -> Tensor:
        """Columns of all rows, shape (Q, k).

        Raises:
            BudgetError: Before anything is asked, if the budget does not pay for the question.
            JournalError: If the journal has a question of another structure in this place.
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
            self.rows, self._kept = before, None
            raise

    def decide(self, name: str, value: Any) -> Any:
        """The decision that was made in this place before; else this one, kept from now on."""
        made, place = self._here().decisions, len(self._decisions)
        if place < len(made):
            if made[place][0] != name:
                raise self._other(f"a decision about {made[place][0]}", f"one about {name}")
            value = made[place][1]
        self._decisions.append((name, value))
        return value

    def start(self, number: int, rows: int) -> None:
        """Go on from a snapshot: so many questions and rows were answered before."""
        self.number, self.rows = number, rows
        self._kept, self._decisions = None, []
        if self.notify is not None and rows:
            self.notify(rows)

    def _here(self) -> Kept:
        """What the journal has of the next question."""
        if self._kept is None:
            self._kept = self.journal.kept(self.number)
        return self._kept

    def _answer(self, question: Question) -> Tensor:
        starts = range(0, len(question), self.part)
        parts = [question.part(i, min(i + self.part, len(question))) for i in starts]
        plan, kept = Plan(question.kind, tuple(question.points.tolist())), self._here()
        if kept.plan is not None and kept.plan != plan:
            where = "" if len(plan.points) != len(kept.plan.points) else " (of other points)"
            raise self._other(str(kept.plan), f"{plan}{where}")
        most = max([0, *kept.answers, *kept.requests, *kept.damaged])
        if most >= len(parts):
            raise self._other(f"of {most + 1} parts or more", f"of {len(parts)}")
        found = dict(kept.answers)
        for place, answer in found.items():
            if len(answer.columns) != len(parts[place]):
                raise self._other(
                    f"answered with {len(answer.columns)} rows in part {place}",
                    f"of {len(parts[place])} there",
                )
            self._note(len(parts[place]))
        self._missing(parts, plan, kept, found)
        self.number, self._kept, self._decisions = self.number + 1, None, []
        return torch.cat([found[place].columns for place in range(len(parts))])

    def _missing(
        self, parts: list[Question], plan: Plan, kept: Kept, found: dict[int, Answer]
    ) -> None:
        """Ask for the parts that are not there."""
        waiting: dict[Future[Answer], int] = {}
        todo = [place for place in range(len(parts)) if place not in found]
        error: BaseException | None = None
        if not todo:
            return
        first: dict[str, Any] = {}
        if kept.plan is None:
            first = {"plan": plan, "decisions": self._decisions}
        arrived: dict[int, Answer] = {}
        # The threads do arithmetic too: as many threads of torch for each as here.
        with ThreadPoolExecutor(
            min(self.concurrency, len(todo)),
            "ask",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        ) as pool:
            while (todo and error is None) or waiting or arrived:
                ready, fresh = dict[int, Sequence[Request]](), dict[int, Sequence[Request]]()
                while todo and error is None and len(waiting) + len(ready) < self.concurrency:
                    place = todo.pop(0)
                    ready[place] = kept.requests.get(place, ())
                    if not ready[place]:
                        ready[place] = fresh[place] = self._prepare(parts[place], place)
                # What is sent next, and what has come: on the disk before either is used.
                self.journal.write(
                    self.number, **first, requests=fresh, answers=arrived, repaired=kept.paid
                )
                first = {}
                for place, answer in arrived.items():
                    found[place] = answer
                    self._note(len(parts[place]))
                arrived = {}
                for place, requests in ready.items():
                    stored = place in kept.requests
                    waiting[pool.submit(self._ask, parts[place], requests, stored)] = place
                for future in wait(waiting, return_when=FIRST_COMPLETED).done if waiting else ():
                    place = waiting.pop(future)
                    if (failure := future.exception()) is not None:
                        error = error or self._explained(failure, place, kept)
                        continue
                    arrived[place] = future.result()
        if error is not None:
            raise error

    def _prepare(self, question: Question, place: int) -> Sequence[Request]:
        key = f"{self.journal.run}-{self.number}-{place}"
        if isinstance(self.objective, RequestObjective):
            return self.objective.prepare(question, key)
        return [Request(key, _bytes(question))]

    def _ask(self, question: Question, requests: Sequence[Request], stored: bool) -> Answer:
        """``stored``: the requests are of another process, so its parameters count."""
        if isinstance(self.objective, RequestObjective):
            answer = self.objective.send(question, requests)
            return Answer(checked(answer.columns, question), answer.cost)
        if stored:
            question = _question(requests[0].body)
        if isinstance(self.objective, KeyedObjective):
            answer = self.objective.answer(question, requests[0].key)
            return Answer(checked(answer.columns, question), answer.cost)
        return Answer(checked(self.objective(question.parameters, question.points), question))

    def _explained(self, failure: BaseException, place: int, kept: Kept) -> BaseException:
        """Why it failed, where the journal has to do with it."""
        if place not in kept.damaged or not isinstance(failure, Exception):
            return failure
        error = JournalError(
            f"the journal {self.journal.path} is damaged: {kept.damaged[place]} fails its "
            f"checksum, and asking again under its key failed ({failure}). If that may pass, start "
            "the same command again; else restore the file from a backup, or start anew elsewhere"
        )
        error.__cause__ = failure
        return error

    def _other(self, there: str, here: str) -> JournalError:
        return JournalError(
            f"question {self.number} was {there} when the journal {self.journal.path} was written, "
            f"and is now {here}: the run would go another way than the one that was paid for. "
            "Nothing was asked and nothing is lost; go on with the settings (data, --budget, "
            "version) with which it was begun"
        )

    def _note(self, rows: int) -> None:
        self.rows += rows
        if self.notify is not None:
            self.notify(rows)


def drive(
    inquiry: Inquiry,
    answering: Answering,
    after: Callable[[], None] = lambda: None,
    share: float = SHARE,
) -> None:
    """Ask and tell until there is nothing more to ask, from the last snapshot on.

    Args:
        inquiry: Who asks. If it has a state, that is kept at its pauses.
        answering: Who answers.
        after: Called behind every answer.
        share: Of the time that snapshots may take.
    """
    inquiry.decide = answering.decide
    snapshots = Snapshots.of(inquiry, answering.journal, share)
    if snapshots is not None and (number := snapshots.restore()) is not None:
        answering.start(number, inquiry.asked)
    while not inquiry.done:
        inquiry.tell(answering.answer(inquiry.ask()))
        after()
        if snapshots is not None and not inquiry.waiting and not inquiry.done:
            snapshots.offer(answering.number)


def _bytes(question: Question) -> bytes:
    """A question as it is kept; a vector that all rows share once."""
    values = question.parameters
    if len(values) > 1 and values.stride(0) == 0:
        values = values[:1]
    return encode(
        {"parameters": values.to(torch.float32), "points": question.points},
        {"kind": question.kind},
    )


def _question(body: bytes) -> Question:
    try:
        tensors, about = decode(
            bytearray(body), {"parameters": torch.float32, "points": torch.int64}
        )
    except WireError as error:
        raise JournalError(f"a request in the journal cannot be read: {error}") from error
    values, points = tensors["parameters"], tensors["points"]
    return Question(values.expand(len(points), -1), points, about["kind"])
