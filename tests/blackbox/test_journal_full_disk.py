"""A journal on a full disk: waited for, then said in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flops.blackbox import Candidates
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from tests.support.keyed_service import D, Service

FULL = """
import resource, signal, sys, torch
sys.path.insert(0, sys.argv[2])
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal, JournalError
from flops.blackbox.objective import Candidates
from tests.support.keyed_service import D, Service
def say(message): print("said", message, flush=True)
journal = Journal(sys.argv[1], {}, say, patience=float(sys.argv[3]))
evaluator = Evaluator(Service(), journal, part=64)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for n in range(200):
    if n == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    if n == 4 and len(sys.argv) > 4:  # somebody makes room
        import threading
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        threading.Timer(2, resource.setrlimit, (resource.RLIMIT_FSIZE, unlimited)).start()
    try:
        evaluator.evaluate(Candidates(torch.full((64, D), float(n)), torch.zeros(64).long()))
    except JournalError as error:
        print("stopped", error)
        break
    print("answered", n, flush=True)
"""


def full(path: Path, *options: str) -> list[str]:
    resource = pytest.importorskip("resource")
    assert resource
    root = str(Path(__file__).parents[2])
    arguments = [sys.executable, "-c", FULL, str(path), root, *options]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_full_disk_is_waited_for_and_then_said_in_a_sentence(tmp_path) -> None:
    path = tmp_path / "journal"
    said = full(path, "1")
    answered = [line for line in said if line.startswith("answered")]
    assert 4 <= len(answered) < 200
    assert sum(line.startswith("said the journal") for line in said) == 1
    assert said[-1].startswith("stopped the journal")
    assert "free some space" in said[-1]
    assert "nothing is charged twice" in said[-1]
    journal = Journal(path, {})
    assert journal.paid()["queries"] >= 64 * len(answered)
    service = Service()
    evaluator = Evaluator(service, journal, part=64)
    for n in range(len(answered) + 1):  # it goes on
        evaluator.evaluate(Candidates(torch.full((64, D), float(n)), torch.zeros(64).long()))
    assert service.charged <= 64
    journal.close()


def test_a_disk_that_was_full_for_a_while_changes_nothing(tmp_path) -> None:
    said = full(tmp_path / "journal", "60", "makes room")
    assert sum(line.startswith("answered") for line in said) == 200
    assert sum(line.startswith("said") for line in said) == 1
