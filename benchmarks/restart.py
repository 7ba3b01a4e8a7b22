"""Restart of a long run: seconds until a `Tuner` goes on, after 50,000 rows with a journal.

The process is the same, so that importing torch is not part of it; the journal is opened again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flops import LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.blackbox import Tuner

ROWS, POINTS, SIZE, BATCH, QUERIES = 50_000, 160, 704, 64, 20
CENTRES = torch.randn(POINTS, SIZE, generator=torch.Generator().manual_seed(0))
KINDS: dict[str, dict[str, Any]] = {
    "lr": {},
    "ops-lr": {"allocator": Gaussian(kernel=False)},
    "shaped by losses": {"estimator": LikelihoodRatio(0.01, shaping=Shaping())},
}


def losses(parameters: Tensor, points: Tensor) -> Tensor:
    return (parameters - CENTRES[points]).square().mean(1)


def made(path: Path, kind: str, rows: int) -> Tuner:
    options = {"estimator": LikelihoodRatio(0.01)} | KINDS[kind]
    return Tuner(
        torch.zeros(SIZE),
        losses,
        points=POINTS,
        journal=path,
        budget=rows,
        batch=BATCH,
        queries=QUERIES,
        **options,
    )


def run(rows: int = ROWS) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.db"
            began = time.perf_counter()
            with made(path, kind, rows) as tuner:
                for _ in tuner.run():
                    pass
                steps, spent, whole = tuner.steps, tuner.spent, time.perf_counter() - began
                parameters = tuner.parameters
            began = time.perf_counter()
            with made(path, kind, rows) as again:
                for _ in again.run():  # what came after the last snapshot
                    pass
                seconds = time.perf_counter() - began
                if not torch.equal(again.parameters, parameters) or again.spent != spent:
                    raise AssertionError("the restart is not the same run")
            found[kind] = {
                "rows": spent,
                "steps": steps,
                "run, s": whole,
                "restart, s": seconds,
                "journal, MB": path.stat().st_size / 2**20,
            }
    return found
