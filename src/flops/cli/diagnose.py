"""`flops diagnose`: quality of gradient estimates on the bundled model."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from flops.diagnostics.table import diagnosis_tables
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.bundled_diagnosis import diagnose_bundled


@dataclass(frozen=True)
class Diagnose:
    """Diagnose gradient estimates by group, on the bundled ViT and the digits.

    Prints, for every group and allocator, the cosine to the exact gradient (mean and standard
    deviation over repeats), J relative to the optimal allocation, the signal-to-noise ratio and the
    cost; and a sweep over sigma with the recommended one. For your own model and data, use
    `flops.diagnose`.

    For example:

    $ flops diagnose
    $ flops diagnose --steps 150 --targets stage --queries 8
    $ flops diagnose --steps 150 --targets stage --shaping
    $ flops diagnose --estimator spsa --json > spsa.json
    """

    estimator: Literal["lr", "spsa", "es"] = "lr"
    """Estimator of the layers: likelihood ratio, SPSA or ES."""
    targets: Targets = "block"
    """What likelihood ratio perturbs."""
    shaping: bool = False
    """Use shaped noise with likelihood ratio, trained on 40 other batches."""
    sigma: float = 1e-3
    """Noise scale."""
    queries: int = 20
    """Mean queries per point and group."""
    batch: int = 64
    """Batch size."""
    steps: int = 0
    """Steps of backpropagation on the digits before measuring: 0 is a fresh head, 150 is near
    convergence."""
    repeats: int = 8
    """Estimates per group and allocator."""
    seed: int = 0
    """Seed of the noise."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        """Measure and print."""
        console = Console(stderr=self.json)
        with console.status("measuring") if console.is_terminal else nullcontext():
            found = diagnose_bundled(
                self.estimator,
                self.targets,
                shaping=self.shaping,
                sigma=self.sigma,
                queries=self.queries,
                batch=self.batch,
                steps=self.steps,
                repeats=self.repeats,
                seed=self.seed,
            )
        if self.json:
            sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
            return
        for table in diagnosis_tables(found):
            console.print(table)
