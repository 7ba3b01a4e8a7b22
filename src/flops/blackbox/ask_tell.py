"""The ask/tell interface: `ask` returns candidates to evaluate, `tell` takes their values.

Values may come late, out of order and in parts: `tell(values, part)` names the rows they are of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flops.blackbox.failures import FailureMeter, OnFailure
from flops.blackbox.objective import Candidates, Objective, ObjectiveError, checked, columns_of
from flops.errors import FlopsError
from flops.passes.guards import Atomic, DeferSignals
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
        recorded: Says whether the values of the next candidates are recorded, and cost nothing.
        overhead: Rows paid for besides those asked.
        on_failure: What `tell` does about losses that are not finite; None refuses them.
    """

    def __init__(self, objective: Objective | None = None) -> None:
        if objective is not None and not callable(objective) and not _keyed(objective):
            raise FlopsError(f"objective must be a function of (parameters, points): {objective!r}")
        self.objective: Any = objective
        self.asked = 0
        self.decide: Decide | None = None
        self.recorded: Callable[[], bool] = lambda: False
        self.overhead: Callable[[], int] = lambda: 0
        self.on_failure: OnFailure | None = None
        self._pending: Candidates | None = None
        self._missing: Candidates | None = None
        self._columns: Tensor | None = None
        self._tries: Counter[int] = Counter()
        self._lost = 0
        self._meter = FailureMeter(1.0)
        self._round = -1
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
        """Candidates to evaluate next, without rows whose values were told; the same until then.

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
        assert self._missing is not None
        return self._missing

    def tell(self, values: Tensor, of: Candidates | None = None) -> None:
        """Pass values: losses (Q,), or columns with the losses first.

        Args:
            values: One loss per row. With ``on_failure``, one that is not finite is a failed
                attempt: `ask` returns its row again, until it is left out.
            of: The rows they are of: a part of what `ask` returned, in any order. The first value
                of a row counts; values of a round that is over are ignored. None for all rows of
                the last `ask`.

        Raises:
            ObjectiveError: If they are not one finite loss per row; the candidates stay pending.
        """
        if of is not None and 0 <= of.round < self._round + (self._pending is None):
            return  # late: that round has all of its values
        if self._pending is None:
            raise FlopsError("no candidates are pending: call ask() first")
        of = self._missing if of is None else of
        assert of is not None
        if of.round != self._round:
            raise FlopsError("these candidates were not returned by ask(), nor a part of them")
        columns = checked(values, of) if self.on_failure is None else columns_of(values, len(of))
        if self._columns is not None and columns.size(1) != self._columns.size(1):
            raise ObjectiveError(
                f"other rows of this round have {self._columns.size(1)} columns, these "
                f"{columns.size(1)}"
            )
        rows = of.places
        assert self._missing is not None
        fresh = torch.isin(rows, self._missing.places)
        rows, columns = rows[fresh], columns[fresh]
        fine = torch.isfinite(columns[:, 0])
        with DeferSignals(), Atomic():  # Ctrl-C takes effect before or after, not in between
            if bool(fine.any()):
                self._arrived(rows[fine], columns[fine])
            for row in rows[~fine].tolist():
                self._tries[row] += 1
                if self.on_failure is None or self._tries[row] > self.on_failure.retries:
                    self._left_out(row, "told a loss that is not finite")
            self._complete()

    def advance(self, columns: Tensor) -> None:
        """Pass the columns of all rows of the pending round, NaN in those that failed."""
        if self._pending is None:
            raise FlopsError("no candidates are pending: call ask() first")
        columns = columns_of(columns, len(self._pending))
        with DeferSignals(), Atomic():
            self._use(columns)

    def evaluate(self, candidates: Candidates) -> Tensor:
        """Evaluate candidates with the objective."""
        if self.objective is None:
            raise FlopsError("no objective was given: use ask() and tell()")
        found: Tensor = self.objective(candidates.parameters, candidates.points)
        return found

    def restart(self, asked: int = 0) -> None:
        """Drop pending work and start again, with ``asked`` rows evaluated before."""
        self.asked = asked
        self._pending = self._missing = self._columns = self._work = self._failed = None
        self._tries, self._lost, self._done = Counter(), 0, False

    def _arrived(self, rows: Tensor, columns: Tensor) -> None:
        """Take values of some missing rows."""
        assert self._pending is not None
        if self._columns is None:
            self._columns = torch.full((len(self._pending), columns.size(1)), torch.nan)
        self._columns[rows] = columns
        self._remove(rows)

    def _left_out(self, row: int, why: str) -> None:
        """Leave a row out, after its last attempt."""
        assert self._pending is not None
        assert self._missing is not None
        if self.on_failure is not None:
            self._meter.share = self.on_failure.share
        told = len(self._pending) - len(self._missing) + 1
        needed = self._pending.kind != "query" and self._lost + 1 == len(self._pending)
        self._meter.check(told, self._lost + 1, why, needed)
        self._lost += 1
        self._remove(torch.tensor([row]))

    def _remove(self, rows: Tensor) -> None:
        assert self._missing is not None
        left = torch.nonzero(~torch.isin(self._missing.places, rows)).flatten()
        self._missing = self._missing.take(left)

    def _complete(self) -> None:
        """Go on if no row is missing."""
        if self._missing is not None and len(self._missing) == 0:
            assert self._pending is not None
            columns = self._columns
            if columns is None:  # none has arrived
                columns = torch.full((len(self._pending), 1), torch.nan)
            self._meter.close(len(columns), self._lost)
            self._use(columns)

    def _use(self, columns: Tensor) -> None:
        assert self._pending is not None
        self.asked += len(self._pending)
        self._pending = self._missing = self._columns = None
        self._tries, self._lost = Counter(), 0
        self._advance(columns)

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
            if found is not PAUSE:
                self._round += 1
                self._pending = self._missing = replace(found, round=self._round, rows=None)


def _keyed(objective: object) -> bool:
    return callable(getattr(objective, "evaluate", None))
