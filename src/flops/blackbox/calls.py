"""Calls of an objective in flight, on any executor: what came back, what failed, what is late."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field

from flops.blackbox.journal_records import Response
from flops.blackbox.objective import Candidates
from flops.blackbox.open_round import Call
from flops.blackbox.requests import AnyObjective, evaluate_rows


@dataclass
class CallsInFlight:
    """Hands calls to an executor, and collects what becomes of them.

    Args:
        objective: Evaluates the rows.
        candidates: All rows of the round.
        executor: Runs the calls.
        timeout: Seconds for a call, from when it is handed over; None for no limit.
    """

    objective: AnyObjective
    candidates: Candidates
    executor: Executor
    timeout: float | None = None
    _waiting: dict[Future[Response], tuple[Call, float]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: Call) -> None:
        """Start a call."""
        rows = self.candidates.take(call.rows)
        given = (self.objective, rows, call.requests, call.stored, call.pause)
        try:
            future = self.executor.submit(evaluate_rows, *given)
        except Exception as failure:  # a pool that is broken or closed
            future = Future()
            future.set_exception(failure)
        limit = float("inf") if self.timeout is None else call.pause + self.timeout
        self._waiting[future] = (call, time.monotonic() + limit)

    def finished(self) -> list[tuple[Call, Response | BaseException]]:
        """Calls that ended or took too long, at least one if there are any."""
        found: list[tuple[Call, Response | BaseException]] = []
        while self._waiting and not found:
            end = min(deadline for _, deadline in self._waiting.values())
            left = None if end == float("inf") else max(0.0, end - time.monotonic())
            wait(self._waiting, timeout=left, return_when=FIRST_COMPLETED)
            now = time.monotonic()
            for future, (call, deadline) in list(self._waiting.items()):
                if future.done():
                    found.append((call, _outcome(future)))
                elif deadline <= now:
                    future.cancel()
                    late = TimeoutError(f"no answer within {self.timeout:g} s")
                    found.append((call, late))
                else:
                    continue
                del self._waiting[future]
        return found


def _outcome(future: Future[Response]) -> Response | BaseException:
    try:
        return future.exception() or future.result()
    except CancelledError:  # by its executor
        return ConnectionError("the executor cancelled the call")
