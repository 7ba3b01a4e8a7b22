"""Snapshots of a run: its exact state between steps, so that a restart repeats little work.

A snapshot is taken when the time since the last one is long against what that one took, so a run
spends a few per cent of its time on them however large its state is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from flops import __version__
from flops.blackbox.ask_tell import AskTell
from flops.blackbox.journal import Journal, JournalError, pack, unpack
from flops.errors import FlopsError

SHARE = 0.03  # of a run's time is spent on snapshots, at most


@runtime_checkable
class Stateful(Protocol):
    """What can be stopped at a pause and continue from there."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later candidates and results follow from."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where it was taken."""
        ...


@dataclass
class Snapshots:
    """Keeps the state of a run in its journal.

    Args:
        run: Whose.
        journal: Where.
        share: Of the time that snapshots may take.
    """

    run: Stateful
    journal: Journal
    share: float = SHARE
    _took: float = field(default=0.0, init=False)
    _last: float = field(default_factory=lambda: time.monotonic(), init=False)

    @classmethod
    def of(cls, optimizer: AskTell, journal: Journal, share: float) -> Snapshots | None:
        """None for an optimizer without a state."""
        return cls(optimizer, journal, share) if isinstance(optimizer, Stateful) else None

    def restore(self) -> int | None:
        """Bring the run to its last snapshot.

        Returns:
            The number of the next round; None if it starts from its beginning.

        Raises:
            JournalError: If no snapshot can be read, and what came before them is gone.
        """
        damaged = []
        for number, data in self.journal.snapshots():
            if data is None:
                damaged.append(number)
                continue
            kept = unpack(data)
            try:
                self.run.load_state_dict(kept["state"])
            except (FlopsError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise JournalError(
                    f"the snapshot in {self.journal.path}, written by flops {kept['flops']} with "
                    f"torch {kept['torch']}, cannot be read by this version ({error}); finish the "
                    "run with that version"
                ) from error
            self._say(damaged, f"continuing from the one before round {number}")
            return number
        if self.journal.first() not in (None, 0):
            raise JournalError(
                f"the journal {self.journal.path} is damaged: the snapshots before the rounds "
                f"{damaged} fail their checksums. Restore the file from a backup, or start anew "
                "in another folder"
            )
        self._say(damaged, "continuing from the beginning, with the recorded values")
        return None

    def offer(self, number: int) -> bool:
        """At a pause before this round: take a snapshot if it is time for one."""
        if time.monotonic() - self._last < self._took / self.share:
            return False
        began = time.monotonic()
        about = {"flops": __version__, "torch": str(torch.__version__)}
        done = self.journal.save(number, pack({"state": self.run.state_dict(), **about}))
        self._last = time.monotonic()
        self._took = self._last - began
        return done

    def _say(self, damaged: list[int], instead: str) -> None:
        if damaged:
            self.journal.say(
                f"the snapshot before round {damaged[0]} in {self.journal.path} is damaged (it "
                f"fails its checksum); {instead}"
            )
