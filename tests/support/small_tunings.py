"""Small tuning runs of every kind, with and without a journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flops import SPSA, LikelihoodRatio, Shaping
from flops.allocators import Gaussian, Neyman
from flops.blackbox import Tuner
from flops.blackbox.cma import CMAES
from flops.blackbox.drive import drive
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from flops.blackbox.outputs import Outputs
from flops.blackbox.tuning import SplitIndices, Tuning
from tests.support.keyed_service import LABELS, D, N

OUTPUTS = Outputs(
    lambda columns: columns[:, 2:],
    lambda outputs, points: torch.nn.functional.cross_entropy(
        outputs, LABELS[points], reduction="none"
    ),
)
ESTIMATORS: dict[str, Any] = {
    "lr": {"estimator": LikelihoodRatio(0.1)},
    "spsa, learning": {"estimator": SPSA(0.1), "allocator": Gaussian()},
    "pilot": {"estimator": LikelihoodRatio(0.1), "allocator": Neyman(pilot=2)},
    "shaped": {"estimator": LikelihoodRatio(0.1, shaping=Shaping()), "allocator": Neyman()},
    "outputs": {
        "estimator": LikelihoodRatio(0.1, shaping=Shaping()),
        "allocator": Gaussian(),
        "outputs": OUTPUTS,
    },
    "outputs, mean Jacobian": {
        "estimator": LikelihoodRatio(0.1, shaping=Shaping()),
        "allocator": Gaussian(),
        "outputs": replace(OUTPUTS, newest=0),
    },
    "cma-es": {},
}


def make(kind: str, epochs: int = 6) -> Tuning:
    start, points = torch.zeros(D), torch.arange(N)
    steps: Any
    if kind == "cma-es":
        steps = CMAES(start, points=N, sigma=0.3, batch=4, population=5)
    else:
        steps = Tuner(start, points=N, queries=6, batch=4, learning_rate=0.1, **ESTIMATORS[kind])
    embeds = kind == "spsa, learning" or kind.startswith("outputs")

    def embed(found: Tensor) -> None:
        steps.embeddings = found

    split = SplitIndices(points, points, points)
    return Tuning(steps, start, split, epochs, 0, None, embed if embeds else None)


def end(path: Path | str, kind: str, service: Any) -> Tuning:
    """Run it, with a snapshot at every pause, until it is done or fails."""
    run, journal = make(kind), Journal(path, {"kind": kind})
    try:
        drive(run, Evaluator(service, journal, part=5, concurrency=2), share=1e9)
    finally:
        journal.close()
    return run
