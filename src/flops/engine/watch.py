"""Watch over the other ranks: one that fails, dies or stops is named to all, with its reason.

Ranks that wait for a message look at the key-value store of the process group now and then:

- A rank whose step raises an error writes it there, with the number of messages it has completed.
  Others that wait for its next message raise a `WorkerError` with its number and reason. Where all
  ranks raise at the same message (a loss that is not finite), nobody waits, and all may go on.
- A thread of every rank writes a sign of life. A rank without any for `SILENT` seconds is dead,
  stopped, or cut off.
- Signs of life hold the number of completed messages, so that a timeout names who is behind.
- A rank that does not reach the store for as long is cut off, and stops, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from flops.errors import FlopsError

BEAT = 5.0  # seconds between signs of life
SILENT = 30.0  # seconds without any
PATIENT = 1.0  # seconds of waiting until the store is looked at
LOOK = 0.5  # seconds between looks
NEIGHBOURS = 4  # ranks whose signs of life a rank reads; they tell the others
SHORTEST, LONGEST = 20e-6, 2e-3  # seconds between looks at a message
LENGTH = 400  # characters of a reason
CUT_OFF = (
    "the store of the process group does not answer any more: this host is cut off from that of "
    "process 0"
)


class WorkerError(FlopsError, RuntimeError):
    """Another rank died, does not respond, or is at another step."""


class Watch:
    """Watches the ranks of one process group.

    Args:
        group: The process group.
        rank: Rank of this process.
        size: World size.
        store: Key-value store that all ranks reach; None watches nothing.
    """

    def __init__(self, group: Any, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._cut_off = rank, size, False
        self._store = None if store is None else _clone(store)
        self._messages, self._failed_at, self._stop = 0, -1, threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        if store is not None:
            life = threading.Thread(target=self._live, args=(_clone(store),), daemon=True)
            life.start()
            weakref.finalize(group, self._stop.set)

    def wait(self, work: Any) -> None:
        """Wait until a message is complete.

        Raises:
            WorkerError: If another rank has failed or is silent.
            RuntimeError: If the message failed.
        """
        started, pause, looked = time.monotonic(), SHORTEST, 0.0
        while not work.is_completed():
            time.sleep(pause)
            now = time.monotonic()
            if now - started > PATIENT:
                pause = min(LONGEST, 2 * pause)
                if now - looked > LOOK:
                    looked = now
                    self._look()
        work.wait()
        self._messages += 1

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Tell all ranks why this one (or another) does not go on."""
        rank = self.rank if rank is None else rank
        if rank == self.rank:
            self._failed_at = self._messages
        if self._store is not None:
            text = " ".join(reason.split())[:LENGTH].replace("\x1f", " ").replace("\x1e", " ")
            entry = f"{rank}\x1f{self._messages}\x1f{text}\x1e"
            self._try(lambda store: store.append("failures", entry))

    def reason(self) -> str | None:
        """Who has failed, and why, as far as is known."""
        found = [f"process {rank}: {text}" for rank, text in self._failures()]
        return "; ".join(dict.fromkeys(found)) or (CUT_OFF if self._cut_off else None)

    def behind(self) -> str | None:
        """Which ranks have completed the fewest messages, if not all as many."""
        found = self._read([f"life/{rank}" for rank in range(self.size)])
        counts = {r: int(value.split(b" ")[1]) for r, value in enumerate(found) if value}
        counts[self.rank] = self._messages
        if not counts or min(counts.values()) == max(counts.values()):
            return None
        least = [str(r) for r, n in counts.items() if n == min(counts.values())]
        return f"process {', '.join(least)} has not sent its part: it hangs or is far behind"

    def _look(self) -> None:
        """Raise if another rank has failed or is silent, or if this one is cut off."""
        said = [f"process {rank} failed: {text}" for rank, text in self._failures()]
        if self._cut_off:
            said = [CUT_OFF]
        if said:
            raise self._stopped("; ".join(said))
        now, near = time.monotonic(), range(1, min(NEIGHBOURS, self.size - 1) + 1)
        others = [(self.rank + step) % self.size for step in near]
        found = self._read([f"life/{other}" for other in others])
        for other, value in zip(others, found, strict=True):
            if value is None:
                continue
            if self._seen.get(other, (b"", 0.0))[0] != value:
                self._seen[other] = (value, now)
            elif now - self._seen[other][1] > SILENT:
                reason = f"no sign of life for {SILENT:.0f} s: it was stopped or cut off"
                self.fail(reason, other)
                raise self._stopped(f"process {other} failed: {reason}")

    def _stopped(self, why: str) -> WorkerError:
        return WorkerError(
            f"process {self.rank} of {self.size} stops, because {why}. Parameters and .grad are as "
            "before this step; restart from the last checkpoint, with any number of processes."
        )

    def _failures(self) -> Sequence[tuple[int, str]]:
        """Ranks that will not send what this one waits for."""
        found = []
        (read,) = self._read(["failures"])
        for entry in (read or b"").decode(errors="replace").split("\x1e"):
            if entry:
                rank, messages, text = entry.split("\x1f")
                here = int(messages) == self._messages != self._failed_at
                if here and int(rank) != self.rank:
                    found.append((int(rank), text))
        return found

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of the store; None where there is none yet, or the store is gone."""
        found: list[bytes | None] = [None] * len(keys)

        def read(store: Any) -> None:
            for number, key in enumerate(keys):
                if store.check([key]):
                    found[number] = store.get(key)

        self._try(read)
        return [None] * len(keys) if self._cut_off else found

    def _try(self, action: Callable[[Any], Any]) -> None:
        """Use the store, in a thread: its client waits forever if no answer comes.

        A store that is gone says so at once; then the next message fails.
        """
        if self._cut_off or self._store is None:
            return

        def run() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                action(self._store)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SILENT)
        self._cut_off = thread.is_alive()

    def _live(self, store: Any) -> None:
        count = 0
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._stop.wait(BEAT if count else 0.0):
                count += 1
                store.set(f"life/{self.rank}", f"{count} {self._messages}")


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: Any, rank: int, size: int) -> Watch:
    """The watch of a process group, made at its first message."""
    found = _watches.get(group)
    if found is None:
        found = _watches[group] = Watch(group, rank, size, _store_of(group))
    return found


def _store_of(group: Any) -> Any:
    """A part of the process group's store; None if it has none that can be read at any time."""
    try:
        store = dist.distributed_c10d._get_default_store()
        name = getattr(group, "group_name", "")
        found: Any = dist.distributed_c10d.PrefixStore(f"flops/{name}", store)
        found.append("failures", "")
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return None
    return found


def _clone(store: Any) -> Any:
    """A connection of its own: another thread must not wait for this one."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return store
