"""Evaluates candidates: from the journal if it has their values, else with the objective.

Candidates are split into parts, each requested under its own idempotency key: a service that has
seen the key returns the same values again, free of charge. A request is in the journal, byte for
byte, before it is sent, so that a retry on any machine sends the same bytes. Parts are requested
concurrently, by any executor; every response is recorded at once, even when another part fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flops.blackbox.calls import CallsInFlight
from flops.blackbox.failures import FailureMeter, OnFailure
from flops.blackbox.journal import Journal
from flops.blackbox.journal_file import JournalError
from flops.blackbox.journal_records import Request, Response, Round
from flops.blackbox.objective import Candidates, checked
from flops.blackbox.open_round import Call, OpenRound, mismatch
from flops.blackbox.requests import (
    AnyObjective,
    Inline,
    KeyedObjective,
    RequestObjective,
    Threads,
    prepare,
)
from flops.errors import FlopsError

__all__ = ["BudgetError", "Evaluator", "KeyedObjective", "RequestObjective"]
PART = 256  # rows per request
OUTSIDE = ("validation", "test", "embed")  # kinds of rounds that are not of a step
ENDINGS = 8  # numbers of rounds at the end of a run, for each round before it


class BudgetError(FlopsError):
    """The budget does not cover the next rows."""


@dataclass
class Evaluator:
    """Evaluates candidates in order; each row is paid for once.

    Args:
        objective: Evaluates them; None if only `open` and `keep` are used.
        journal: Where requests and values are recorded.
        budget: Largest number of rows of the run; None for no limit. It may change at any time.
        part: Rows per request. Fixed for a run: other parts would be other requests.
        concurrency: Requests in flight at a time.
        notify: Called with the number of rows after each response.
        executor: Runs the requests; None for this thread, or for own threads with a concurrency
            above 1.
        on_failure: What to do about rows that fail; None raises their errors.

    Attributes:
        number: Ask/tell rounds completed so far.
        rows: Rows evaluated so far, from the journal or not.
        extra: Rows paid for beyond those: evaluated again, or at an end that the run went on from.
    """

    objective: AnyObjective | None
    journal: Journal
    budget: int | None = None
    part: int = PART
    concurrency: int = 1
    notify: Callable[[int], None] | None = None
    executor: Executor | None = None
    on_failure: OnFailure | None = None
    number: int = field(default=0, init=False)
    rows: int = field(default=0, init=False)
    extra: int = field(default=0, init=False)
    _ends: int = field(default=0, init=False)
    _recorded: Round | None = field(default=None, init=False)
    _decisions: list[tuple[str, Any]] = field(default_factory=list, init=False)
    _split: str | None = field(default=None, init=False)  # why a call was split; empty once said

    def __post_init__(self) -> None:
        """Read what was paid for."""
        self.extra = self.journal.paid().get("extra", 0)
        self._meter = FailureMeter(1.0 if self.on_failure is None else self.on_failure.share)

    @property
    def spent(self) -> int:
        """Rows paid for so far."""
        return self.rows + self.extra

    def evaluate(self, candidates: Candidates) -> Tensor:
        """Evaluate candidates: columns of all rows, shape (Q, k); NaN for a row that failed.

        Raises:
            BudgetError: If the budget does not cover the candidates; nothing is sent.
            FailureError: If too many rows failed.
            JournalError: If the journal has other points or another kind in this round.
        """
        before = self.rows
        try:
            opened = self.open(candidates)
            self.request(opened)
            return self.close(opened)
        except BaseException:  # a retry starts from here
            self.rows, self._recorded = before, None
            raise

    def open(self, candidates: Candidates) -> OpenRound:
        """Begin a round with what the journal has of it.

        Raises:
            BudgetError: If the budget does not cover the rest.
            JournalError: If it has other points or another kind in this round.
        """
        number, recorded = self.number, self._here()
        if candidates.ending:
            number = -(ENDINGS * self.number + 1 + self._ends)
            recorded = self.journal.read(number)
            early = self.journal.read(self.number + self._ends)
            if recorded.signature is None and early.signature is not None:
                opened = OpenRound(self.number + self._ends, candidates, self.part, early)
                if early.signature == opened.signature:  # journals had it there before
                    number, recorded = opened.number, early
                    self.extra += opened.known
        opened = OpenRound(number, candidates, self.part, recorded)
        wrong = mismatch(opened, self._mismatch)
        if wrong is not None:
            raise wrong
        missing = len(opened.missing())
        if self.budget is not None and missing and self.spent + missing > self.budget:
            raise BudgetError(
                f"the budget of {self.budget:,} queries does not cover {missing:,} more after "
                f"{self.spent:,}; give a budget of at least {self.spent + missing:,}"
            )
        self._note(opened, opened.known, paid=False)
        return opened

    def keep(self, opened: OpenRound, rows: Tensor, columns: Tensor) -> None:
        """Record values of some rows, which came in their own time."""
        self.journal.write(opened.number, **self._first(opened), kept=[(rows, Response(columns))])
        self._take(opened, rows, columns)

    def begin(self, opened: OpenRound) -> None:
        """Record structure and decisions of a round, before its rows are handed out."""
        self.journal.write(opened.number, **self._first(opened))

    def close(self, opened: OpenRound) -> Tensor:
        """End a round: columns of all rows."""
        responses, counted, lost = opened.rest()
        if responses:
            self.journal.write(
                opened.number,
                **self._first(opened),
                responses=responses,
                repaired=opened.recorded.paid,
                counted=counted,
                failures=lost,
            )
            self.journal.forget_kept(opened.number)
            opened.found |= responses
        self._meter.close(len(opened.candidates), len(lost))
        if opened.candidates.ending:
            self._ends += 1
        else:
            self.number, self._ends = self.number + 1, 0
            self._recorded, self._decisions = None, []
        return opened.columns()

    def fail(self, opened: OpenRound, row: int, why: str) -> None:
        """Leave a row out.

        Raises:
            FailureError: If too many of the latest rows failed.
        """
        opened.failed[row] = why
        self._note(opened, 1)
        tried = opened.known + len(opened.failed)
        needed = opened.candidates.kind != "query"  # a step can do without some queries
        needed = needed and len(opened.failed) == len(opened.candidates)
        self._meter.check(tried, len(opened.failed), why, needed)

    def recorded(self) -> bool:
        """Whether the journal has the next round of a step, so that it costs nothing."""
        signature = self._here().signature
        return signature is not None and signature.kind not in OUTSIDE

    def decide(self, name: str, value: Any) -> Any:
        """The recorded decision, if there is one here; else this one, recorded with the round."""
        made, place = self._here().decisions, len(self._decisions)
        if place < len(made):
            if made[place][0] != name:
                raise self._mismatch(f"a decision about {made[place][0]}", f"one about {name}")
            value = made[place][1]
        self._decisions.append((name, value))
        return value

    def start(self, number: int, rows: int) -> None:
        """Continue from a snapshot, after this many rounds and rows."""
        self.number, self.rows, self._ends = number, rows, 0
        self._recorded, self._decisions = None, []
        if self.notify is not None and rows:
            self.notify(rows)

    def _here(self) -> Round:
        """The journal's record of the next round."""
        if self._recorded is None:
            self._recorded = self.journal.read(self.number)
        return self._recorded

    def _first(self, opened: OpenRound) -> dict[str, Any]:
        """Structure and decisions, unless they are recorded; once."""
        if opened.recorded.signature is not None:
            return {}
        opened.recorded = replace(opened.recorded, signature=opened.signature)
        return {"signature": opened.signature, "decisions": self._decisions}

    def _take(self, opened: OpenRound, rows: Tensor, columns: Tensor) -> None:
        opened.kept |= dict(zip(rows.tolist(), columns, strict=True))
        self._note(opened, len(rows))

    def request(self, opened: OpenRound) -> None:
        """Evaluate all missing rows of a round with the objective.

        Raises:
            FailureError: If too many rows failed; those that did may be requested again.
        """
        if self.objective is None:
            raise FlopsError("no objective was given: use ask() and tell()")
        try:
            self._requests(opened, self.objective)
        except BaseException:
            self._note(opened, -len(opened.failed))
            opened.failed.clear()
            raise

    def _requests(self, opened: OpenRound, objective: AnyObjective) -> None:
        key, recorded = f"{self.journal.run}-{opened.number}", opened.recorded
        todo, policy = deque(opened.calls(key)), self.on_failure
        timeout = None if policy is None else policy.timeout
        alone = self.concurrency == 1 and timeout is None
        executor = self.executor or (Inline() if alone else Threads())
        calls = CallsInFlight(objective, opened.candidates, executor, timeout)
        error: BaseException | None = None
        arrived: dict[int, Response] = {}
        kept: list[tuple[Tensor, Response]] = []
        again = 0
        while (todo and error is None) or len(calls) or arrived or kept:
            ready: list[Call] = []
            while todo and error is None and len(calls) + len(ready) < self.concurrency:
                ready.append(todo.popleft())
            unsent = [c for c in ready if not c.requests]
            fresh = {c.place: _prepared(objective, c, opened) for c in unsent}
            # Requests and values are on disk before they are sent or used.
            self.journal.write(
                opened.number,
                **self._first(opened),
                requests=fresh,
                responses=arrived,
                repaired=recorded.paid,
                kept=kept,
                again=again,
            )
            for place, response in arrived.items():
                opened.found[place] = response
                self._note(opened, len(response.columns))
            for rows, response in kept:
                self._take(opened, rows, response.columns)
            arrived, kept, again = {}, [], 0
            for call in ready:
                calls.submit(call)
            for call, outcome in calls.finished():
                before = self.extra
                try:
                    more = self._outcome(outcome, call, opened, arrived, kept, key)
                    again += sum(1 for c in more if c.attempt and not c.pause)
                    todo.extend(more)
                except BaseException as failure:
                    self.extra = before
                    error = error or self._explained(failure, call.place, recorded)
        if error is not None:
            self.extra -= again  # not evaluated after all
            raise error

    def _outcome(
        self,
        outcome: Response | BaseException,
        call: Call,
        opened: OpenRound,
        arrived: dict[int, Response],
        kept: list[tuple[Tensor, Response]],
        key: str,
    ) -> list[Call]:
        """Take the values of a call; returns calls for rows that are tried again.

        Raises:
            BaseException: The error of the call, or FailureError.
        """
        policy = self.on_failure
        if isinstance(outcome, BaseException):
            lost = isinstance(outcome, JournalError) or not isinstance(outcome, Exception)
            if policy is None or lost:
                raise outcome
            return self._retried(call, opened, key, outcome, policy)
        response = outcome
        if policy is None:
            checked(response.columns, opened.candidates.take(call.rows))
        if call.place < 0 and self._split:  # it may be so for every call
            self.journal.say(
                f"a call with several rows failed ({self._split}), a row alone did not: the rows "
                "of such calls are evaluated one by one, which is slow"
            )
            self._split = ""
        fine = torch.isfinite(response.columns[:, 0])
        if bool(fine.all()) and call.place >= 0:
            arrived[call.place] = response
            return []
        if bool(fine.any()):
            kept.append((call.rows[fine], Response(response.columns[fine], response.cost)))
        more: list[Call] = []
        for row, value in zip(
            call.rows[~fine].tolist(), response.columns[~fine, 0].tolist(), strict=True
        ):
            assert policy is not None
            times = call.attempt + 1 if call.place < 0 else 1
            open_rows = len(opened.candidates) - opened.known - len(opened.failed)
            affordable = self.budget is None or self.budget - self.spent > open_rows
            if times <= policy.retries and affordable:
                more.append(opened.single(row, key, times))
                self.extra += 1
            else:
                self.fail(opened, row, f"the loss is {value}")
        return more

    def _retried(
        self, call: Call, opened: OpenRound, key: str, failure: BaseException, policy: OnFailure
    ) -> list[Call]:
        """Another attempt of a call that raised; then row by row; then none."""
        if call.attempt < policy.retries:
            pause = max(1e-3, policy.wait * 2**call.attempt)
            return [replace(call, attempt=call.attempt + 1, pause=pause)]
        if len(call.rows) > 1:
            if self._split is None:
                self._split = f"{type(failure).__name__}: {failure}"[:200]
            return [opened.single(row, key) for row in call.rows.tolist()]
        self.fail(opened, int(call.rows[0]), f"{type(failure).__name__}: {failure}"[:300])
        return []

    def _explained(self, failure: BaseException, place: int, recorded: Round) -> BaseException:
        """Why it failed, if the journal is the cause."""
        if place not in recorded.damaged or not isinstance(failure, Exception):
            return failure
        error = JournalError(
            f"the journal {self.journal.path} is damaged: {recorded.damaged[place]} fails its "
            f"checksum, and a repeat under its key failed ({failure}). If that is temporary, start "
            "the same command again; else restore the file from a backup, or start again in "
            "another folder"
        )
        error.__cause__ = failure
        return error

    def _mismatch(self, there: str, here: str) -> JournalError:
        return JournalError(
            f"round {self.number} was {there} when the journal {self.journal.path} was written, "
            f"and is now {here}: the run would diverge from the one that was paid for. "
            "Nothing was sent and nothing is lost; continue with the data and the flops version "
            f"({self.journal.version}) that started it"
        )

    def _note(self, opened: OpenRound, rows: int, paid: bool = True) -> None:
        if not opened.candidates.ending:
            self.rows += rows
        elif paid:
            self.extra += rows
        if self.notify is not None and rows:
            self.notify(rows)


def _prepared(objective: AnyObjective, call: Call, opened: OpenRound) -> Sequence[Request]:
    """Serialize a call's rows; nothing if an earlier process has."""
    stored = opened.recorded.requests.get(call.place, ())
    if stored and stored[0].key.startswith(call.key):
        call.requests, call.stored = stored, True
        return ()
    call.requests = prepare(objective, opened.candidates.take(call.rows), call.key)
    return call.requests
