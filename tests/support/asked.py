"""An objective that remembers what it was asked."""

from __future__ import annotations

import threading

import torch

from flops.blackbox import Candidates
from flops.blackbox.journal import Response


def candidates(rows: int = 10, value: float = 0.5) -> Candidates:
    return Candidates(torch.full((rows, 3), value), torch.arange(rows))


class Asked:
    """An objective that remembers what it was asked, and fails where it is told to."""

    def __init__(self, fails: frozenset[int] = frozenset()) -> None:
        self.keys: list[str] = []
        self.rows: list[int] = []
        self.fails, self.lock = fails, threading.Lock()

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        with self.lock:
            self.keys.append(key)
            self.rows += candidates.points.tolist()
        if set(candidates.points.tolist()) & self.fails:
            raise ConnectionError(f"no answer to {key}")
        losses = candidates.parameters.square().sum(1) + candidates.points
        return Response(torch.stack([losses, losses > 3], 1), {"texts": 2 * len(candidates)})
