"""Rows that fail: retried, then left out; a run with too many of them stops.

A row fails if the objective raises, exceeds its time, or returns a loss that is not finite. The
estimate is then made from the rows that arrived (`flops.estimators.arrived`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flops.errors import FlopsError

LEAST = 50  # rows by which a share of failures is judged
OPTION = "on_failure.share of a Tuner, --max-failures of flops tune"


class FailureError(FlopsError):
    """Too many rows failed."""


@dataclass(frozen=True)
class OnFailure:
    """What to do about rows that fail.

    Args:
        retries: Further attempts. A call that raised or took too long is repeated under the same
            idempotency key; then its rows are evaluated one by one. A row whose loss is not finite
            is evaluated again under a new key, and counted again.
        timeout: Seconds for a call, from when it is handed to the executor; None for no limit.
            Python cannot end a thread: a call that never returns keeps its thread.
        share: Largest share of the latest rows that may fail. Beyond it the run stops: values that
            arrived are kept, and rows of this round that failed are tried again when it goes on.
        wait: Seconds before the first retry of a call, doubled for each one after it.
    """

    retries: int = 2
    timeout: float | None = None
    share: float = 0.5
    wait: float = 0.1

    def __post_init__(self) -> None:
        """Check the options."""
        if self.retries < 0 or self.wait < 0:
            raise FlopsError(
                f"retries and wait must not be negative: {self.retries}, {self.wait:g}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise FlopsError(f"timeout must be positive, not {self.timeout}")
        if not 0 <= self.share <= 1:
            raise FlopsError(f"share must be between 0 and 1, not {self.share}")


@dataclass
class FailureMeter:
    """The share of failures among the latest rows.

    Args:
        share: Largest share allowed.
    """

    share: float
    _rounds: deque[tuple[int, int]] = field(default_factory=deque, init=False)

    def close(self, rows: int, failed: int) -> None:
        """Count a round; only as many of the latest are kept as make up `LEAST` rows."""
        self._rounds.append((rows, failed))
        while sum(r for r, _ in self._rounds) - self._rounds[0][0] >= LEAST:
            self._rounds.popleft()

    def check(self, rows: int, failed: int, why: str, needed: bool = False) -> None:
        """Raise if too many failed, of the latest rounds and the rows of this one so far.

        Args:
            rows: Rows of this round that were tried.
            failed: Those that failed.
            why: What happened to the last of them.
            needed: Whether these were all rows of a round that cannot go without any.

        Raises:
            FailureError: Says how many, and why.
        """
        tried = rows + sum(r for r, _ in self._rounds)
        lost = failed + sum(f for _, f in self._rounds)
        if needed:
            said = f"all {rows:,} rows of a round that cannot do without any failed"
        elif tried >= LEAST and lost > self.share * tried:
            said = (
                f"{lost:,} of the last {tried:,} rows failed, more than {self.share:g} ({OPTION})"
            )
        else:
            return
        raise FailureError(
            f"{said}; the last: {why}. All values that arrived are kept: mend the "
            "objective and start again, and only the rows that failed are evaluated"
        )
