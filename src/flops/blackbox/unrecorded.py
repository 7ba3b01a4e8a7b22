"""A run without a journal: the evaluator of one with a journal, and nothing on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flops.blackbox.journal import Journal
from flops.blackbox.journal_file import warn
from flops.blackbox.journal_records import Round


class Unrecorded(Journal):
    """Forgets everything but the counts."""

    def __init__(self) -> None:
        self.path, self.say, self.free = "(none)", warn, ()
        self.run, self.version = "run", ""
        self._lost: list[tuple[int, int, int, str]] = []
        self._counted = {}

    def read(self, number: int) -> Round:
        """Nothing."""
        return Round(None, [], {}, {}, {}, set())

    def write(
        self,
        number: int,
        *_: Any,
        failures: Mapping[int, tuple[int, str]] | None = None,
        **__: Any,
    ) -> None:
        """Remember the failures only."""
        self._lost += [(number, row, *about) for row, about in (failures or {}).items()]

    def forget_kept(self, number: int) -> None:
        """Nothing was kept."""

    def failures(self) -> list[tuple[int, int, int, str]]:
        """Rows that were left out."""
        return list(self._lost)

    def save(self, number: int, state: bytes) -> bool:
        """No snapshot."""
        return False

    def snapshots(self) -> Iterator[tuple[int, bytes | None]]:
        """No snapshot."""
        return iter(())

    def first(self) -> int | None:
        """No round."""
        return None

    def paid(self) -> dict[str, int]:
        """Nothing of an earlier process."""
        return {}

    def counters(self) -> dict[str, float]:
        """Counters of this process."""
        return dict(self._counted)

    def close(self) -> None:
        """Nothing to close."""

    def _commit(self, todo: Sequence[Any], patience: float | None = None) -> None:
        return
