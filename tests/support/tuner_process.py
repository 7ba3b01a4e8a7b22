"""A tuner in a process of its own, to be killed: `python -m tests.support.tuner_process folder`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from flops import LikelihoodRatio, Shaping
from flops.allocators import Gaussian
from flops.blackbox import Tuner
from tests.support.paid import D, N, Paid

STEPS = 40
KINDS = {
    "lr": {"estimator": LikelihoodRatio(0.1)},
    "shaped": {
        "estimator": LikelihoodRatio(0.1, shaping=Shaping()),
        "allocator": Gaussian(kernel=False),
    },
}


def run(folder: Path, kind: str, seconds: float = 0.0) -> tuple[Tuner, Paid]:
    """Begin or go on, to the end."""
    service = Paid(str(folder / f"{kind}-ledger.db"), seconds)
    tuner = Tuner(
        torch.zeros(D),
        service,
        points=N,
        journal=folder / f"{kind}.db",
        queries=6,
        batch=10,
        part=16,
        **KINDS[kind],
    )
    list(tuner.run(until=STEPS))
    return tuner, service


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, method = Path(sys.argv[1]), sys.argv[2]
    found, _ = run(where, method, 0.01)
    torch.save(found.parameters, where / f"{method}.pt")
    found.close()
