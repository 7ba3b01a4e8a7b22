"""Evaluates candidates: from the journal if it has their values, else with the objective.

Candidates are split into parts, each requested under its own idempotency key: a service that has
seen the key returns the same values again, free of charge. A request is in the journal, byte for
byte, before it is sent, so that a retry on any machine sends the same bytes. Parts are requested
concurrently; every response is recorded at once, even when another part fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flops.blackbox.ask_tell import AskTell
from flops.blackbox.journal import Journal, Request, Response, Round, Signature
from flops.blackbox.journal_file import JournalError
from flops.blackbox.objective import Candidates, Objective, checked
from flops.blackbox.snapshots import SHARE, Snapshots
from flops.errors import FlopsError

PART = 256  # rows per request


class BudgetError(FlopsError):
    """The budget does not cover the next rows."""


@runtime_checkable
class KeyedObjective(Protocol):
    """An objective that takes an idempotency key with each request and reports its cost."""

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Evaluate under a key; a repeat under the same key must be free."""
        ...


@runtime_checkable
class RequestObjective(Protocol):
    """An objective that sends bytes: requests are serialized once and may be sent again."""

    def prepare(self, candidates: Candidates, key: str) -> Sequence[Request]:
        """Serialize requests, each under a key that starts with this one."""
        ...

    def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
        """Send serialized requests.

        The parameters of the candidates may differ by rounding from those in the requests.
        """
        ...


@dataclass
class Evaluator:
    """Evaluates candidates in order; each row is paid for once.

    Args:
        objective: Evaluates them.
        journal: Where requests and values are recorded.
        budget: Largest number of rows of the run; None for no limit.
        part: Rows per request. Fixed for a run: other parts would be other requests.
        concurrency: Requests in flight at a time.
        notify: Called with the number of rows after each response.

    Attributes:
        number: Ask/tell rounds completed so far.
        rows: Rows evaluated so far, from the journal or not.
    """

    objective: Objective | KeyedObjective | RequestObjective
    journal: Journal
    budget: int | None = None
    part: int = PART
    concurrency: int = 1
    notify: Callable[[int], None] | None = None
    number: int = field(default=0, init=False)
    rows: int = field(default=0, init=False)
    _recorded: Round | None = field(default=None, init=False)
    _decisions: list[tuple[str, Any]] = field(default_factory=list, init=False)

    def evaluate(self, candidates: Candidates) -> Tensor:
        """Evaluate candidates: columns of all rows, shape (Q, k).

        Raises:
            BudgetError: If the budget does not cover the candidates; nothing is sent.
            JournalError: If the journal has other points or another kind in this round.
        """
        if self.budget is not None and self.rows + len(candidates) > self.budget:
            raise BudgetError(
                f"the budget of {self.budget:,} queries does not cover {len(candidates):,} more "
                f"after {self.rows:,}"
            )
        before = self.rows
        try:
            return self._evaluate(candidates)
        except BaseException:  # a retry starts from here
            self.rows, self._recorded = before, None
            raise

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
        self.number, self.rows = number, rows
        self._recorded, self._decisions = None, []
        if self.notify is not None and rows:
            self.notify(rows)

    def _here(self) -> Round:
        """The journal's record of the next round."""
        if self._recorded is None:
            self._recorded = self.journal.read(self.number)
        return self._recorded

    def _evaluate(self, candidates: Candidates) -> Tensor:
        starts = range(0, len(candidates), self.part)
        parts = [candidates.part(i, min(i + self.part, len(candidates))) for i in starts]
        signature, recorded = (
            Signature(candidates.kind, tuple(candidates.points.tolist())),
            self._here(),
        )
        if recorded.signature is not None and recorded.signature != signature:
            where = (
                ""
                if len(signature.points) != len(recorded.signature.points)
                else " (of other points)"
            )
            raise self._mismatch(str(recorded.signature), f"{signature}{where}")
        most = max([0, *recorded.responses, *recorded.requests, *recorded.damaged])
        if most >= len(parts):
            raise self._mismatch(f"of {most + 1} parts or more", f"of {len(parts)}")
        found = dict(recorded.responses)
        for place, response in found.items():
            if len(response.columns) != len(parts[place]):
                raise self._mismatch(
                    f"evaluated with {len(response.columns)} rows in part {place}",
                    f"of {len(parts[place])} there",
                )
            self._note(len(parts[place]))
        self._missing(parts, signature, recorded, found)
        self.number, self._recorded, self._decisions = self.number + 1, None, []
        return torch.cat([found[place].columns for place in range(len(parts))])

    def _missing(
        self,
        parts: list[Candidates],
        signature: Signature,
        recorded: Round,
        found: dict[int, Response],
    ) -> None:
        """Request the parts that the journal does not have."""
        waiting: dict[Future[Response], int] = {}
        todo = [place for place in range(len(parts)) if place not in found]
        error: BaseException | None = None
        if not todo:
            return
        first: dict[str, Any] = {}
        if recorded.signature is None:
            first = {"signature": signature, "decisions": self._decisions}
        arrived: dict[int, Response] = {}
        # Objectives may compute in these threads: each gets the torch threads of this one.
        with ThreadPoolExecutor(
            min(self.concurrency, len(todo)),
            "evaluate",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        ) as pool:
            while (todo and error is None) or waiting or arrived:
                ready, fresh = dict[int, Sequence[Request]](), dict[int, Sequence[Request]]()
                while todo and error is None and len(waiting) + len(ready) < self.concurrency:
                    place = todo.pop(0)
                    ready[place] = recorded.requests.get(place, ())
                    if not ready[place]:
                        ready[place] = fresh[place] = self._prepare(parts[place], place)
                # Requests and values are on disk before they are sent or used.
                self.journal.write(
                    self.number,
                    **first,
                    requests=fresh,
                    responses=arrived,
                    repaired=recorded.paid,
                )
                first = {}
                for place, response in arrived.items():
                    found[place] = response
                    self._note(len(parts[place]))
                arrived = {}
                for place, requests in ready.items():
                    stored = place in recorded.requests
                    waiting[pool.submit(self._request, parts[place], requests, stored)] = place
                for future in wait(waiting, return_when=FIRST_COMPLETED).done if waiting else ():
                    place = waiting.pop(future)
                    if (failure := future.exception()) is not None:
                        error = error or self._explained(failure, place, recorded)
                        continue
                    arrived[place] = future.result()
        if error is not None:
            raise error

    def _prepare(self, candidates: Candidates, place: int) -> Sequence[Request]:
        key = f"{self.journal.run}-{self.number}-{place}"
        if isinstance(self.objective, RequestObjective):
            return self.objective.prepare(candidates, key)
        return [Request(key, _serialize(candidates))]

    def _request(
        self, candidates: Candidates, requests: Sequence[Request], stored: bool
    ) -> Response:
        """``stored``: the requests are from an earlier process, so their parameters count."""
        if isinstance(self.objective, RequestObjective):
            response = self.objective.send(candidates, requests)
            return Response(checked(response.columns, candidates), response.cost)
        if stored:
            candidates = _deserialize(requests[0].body, candidates.kind)
        if isinstance(self.objective, KeyedObjective):
            response = self.objective.evaluate(candidates, requests[0].key)
            return Response(checked(response.columns, candidates), response.cost)
        return Response(
            checked(self.objective(candidates.parameters, candidates.points), candidates)
        )

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
            "Nothing was sent and nothing is lost; continue with the settings (data, --budget) and "
            f"the flops version ({self.journal.version}) that started it"
        )

    def _note(self, rows: int) -> None:
        self.rows += rows
        if self.notify is not None:
            self.notify(rows)


def drive(
    optimizer: AskTell,
    evaluator: Evaluator,
    after: Callable[[], None] = lambda: None,
    share: float = SHARE,
) -> None:
    """Ask, evaluate and tell until the optimizer is done, from the last snapshot on.

    Args:
        optimizer: Proposes candidates. If it has a state, it is saved at its pauses.
        evaluator: Evaluates them.
        after: Called after every round.
        share: Largest fraction of the time spent on snapshots.
    """
    optimizer.decide = evaluator.decide
    snapshots = Snapshots.of(optimizer, evaluator.journal, share)
    if snapshots is not None and (number := snapshots.restore()) is not None:
        evaluator.start(number, optimizer.asked)
    while not optimizer.done:
        optimizer.tell(evaluator.evaluate(optimizer.ask()))
        after()
        if snapshots is not None and not optimizer.waiting and not optimizer.done:
            snapshots.offer(evaluator.number)


def _serialize(candidates: Candidates) -> bytes:
    """Candidates in the safetensors format; a vector that all rows share is stored once."""
    values = candidates.parameters
    if len(values) > 1 and values.stride(0) == 0:
        values = values[:1]
    tensors = {
        "parameters": values.to(torch.float32).contiguous(),
        "points": candidates.points.contiguous(),
    }
    return save(tensors, {"kind": candidates.kind})


def _deserialize(body: bytes, kind: str) -> Candidates:
    try:
        tensors = load(body)
        values, points = tensors["parameters"], tensors["points"]
    except (SafetensorError, KeyError) as error:
        raise JournalError(f"a request in the journal cannot be read: {error}") from error
    return Candidates(values.expand(len(points), -1), points, kind)
