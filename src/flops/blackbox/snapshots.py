"""Snapshots of a run: its exact state between steps, so that a restart replays little.

A snapshot is taken when the time since the last one is long relative to what that one took, so a
run spends a few per cent of its time on them, however large its state is. One that takes less than
a quarter of a second may take up to a tenth of the time: there is then little to replay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from flops import __version__
from flops.blackbox.ask_tell import AskTell
from flops.blackbox.journal import Journal
from flops.blackbox.journal_file import JournalError, pack, unpack
from flops.errors import FlopsError

SHARE = 0.03  # largest fraction of the time spent on snapshots
QUICK, SOON = 0.25, 2.5  # seconds: a quick snapshot is taken as often, so that a restart is quick


@runtime_checkable
class Stateful(Protocol):
    """Can be saved at a pause and continue from there."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later candidates and results depend on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        ...


@dataclass
class Snapshots:
    """Saves the state of a run in its journal.

    Args:
        run: The run.
        journal: Its journal.
        share: Largest fraction of the time spent on snapshots.
    """

    run: Stateful
    journal: Journal
    share: float = SHARE
    _took: float = field(default=0.0, init=False)
    _last: float = field(default_factory=lambda: time.monotonic(), init=False)

    @classmethod
    def of(cls, optimizer: AskTell, journal: Journal, share: float) -> Snapshots | None:
        """Snapshots of an optimizer; None if it has no state."""
        return cls(optimizer, journal, share) if isinstance(optimizer, Stateful) else None

    def restore(self) -> int | None:
        """Load the last snapshot.

        Returns:
            The number of the next round; None if the run starts from the beginning.

        Raises:
            JournalError: If no snapshot can be read and the earlier rounds are deleted.
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
                f"{damaged} fail their checksums. Restore the file from a backup, or start again "
                "in another folder"
            )
        self._say(damaged, "continuing from the beginning, with the recorded values")
        return None

    def offer(self, number: int) -> bool:
        """Take a snapshot before this round if one is due."""
        since = time.monotonic() - self._last
        quick = self._took < QUICK and since > SOON
        if since < self._took / self.share and not quick:
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
