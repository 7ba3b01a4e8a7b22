"""Drives an optimizer to its end, from the last snapshot of its journal on."""

from __future__ import annotations

from collections.abc import Callable

from flops.blackbox.ask_tell import AskTell
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.snapshots import SHARE, Snapshots


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
    snapshots = resume(optimizer, evaluator, share)
    while not optimizer.done:
        optimizer.advance(evaluator.evaluate(optimizer.ask()))
        after()
        if snapshots is not None and not optimizer.waiting and not optimizer.done:
            snapshots.offer(evaluator.number)


def resume(optimizer: AskTell, evaluator: Evaluator, share: float = SHARE) -> Snapshots | None:
    """Connect an optimizer to an evaluator, and load its last snapshot."""
    optimizer.decide, optimizer.recorded = evaluator.decide, evaluator.recorded
    optimizer.overhead = lambda: evaluator.extra
    snapshots = Snapshots.of(optimizer, evaluator.journal, share)
    if snapshots is not None and (number := snapshots.restore()) is not None:
        evaluator.start(number, optimizer.asked)
    return snapshots
