"""What a rank says of the others, from the signs of life in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from flops.engine import watch
from flops.engine.watch import Watch, WorkerError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SILENT": 0.4, "BEAT": 0.05, "PATIENT": 0.0, "LOOK": 0.02}.items():
        monkeypatch.setattr(watch, name, seconds)


class Group:
    """Stands for a process group, which the thread of a watch outlives by no more than a beat."""


class Message:
    """A message that completes at a time."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._at = time.monotonic() + seconds

    def is_completed(self) -> bool:
        return time.monotonic() > self._at

    def wait(self) -> None:
        """It has arrived."""


@contextmanager
def watching(store: Any, rank: int = 0) -> Iterator[Watch]:
    group = Group()
    yield Watch(group, rank, 2, store)
    del group


@pytest.fixture
def store() -> dist.Store:
    found = dist.HashStore()
    found.append("failures", "")
    return found


class Frozen:
    """A store that answers, until the cable is cut: then every answer is waited for."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.cut = store, threading.Event()

    def clone(self) -> Frozen:
        return self

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            if self.cut.is_set():
                threading.Event().wait()
            return getattr(self._store, name)(*arguments)

        return answer


def test_a_rank_that_is_cut_off_stops_in_time(store: dist.Store) -> None:
    frozen = Frozen(store)
    with watching(frozen) as mine:
        mine.wait(Message(0.1))
        frozen.cut.set()
        started = time.monotonic()
        with pytest.raises(WorkerError, match="this host is cut off from that of process 0"):
            mine.wait(Message())
        mine.fail("of my own making")  # nobody hears it, and nobody waits for that
        assert "cut off" in (mine.reason() or "")
        assert mine.behind() is None
        assert time.monotonic() - started < 2


def test_a_silent_rank_is_named_also_after_an_error_of_all(store: dist.Store) -> None:
    with watching(store, 1) as other:
        time.sleep(0.1)
    with watching(store) as mine:
        mine.fail("a loss that is not finite on all ranks")
        with pytest.raises(WorkerError, match="process 1 failed: no sign of life"):
            mine.wait(Message())
    del other


def test_the_own_messages_are_not_those_of_an_old_sign_of_life(store: dist.Store) -> None:
    with watching(store) as mine, watching(store, 1):
        time.sleep(0.1)
        for _ in range(3):
            mine.wait(Message(0.0))
        store.set("life/0", "1 0")
        assert mine.behind() == ("process 1 has not sent its part: it hangs or is far behind")
