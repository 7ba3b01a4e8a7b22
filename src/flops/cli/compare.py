"""`flops compare`: the tables of the paper's section 5.1, for any model and data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flops.errors import FlopsError
from flops.estimators.likelihood_ratio import Targets
from flops.experiments import compare
from flops.experiments.compare_runs import MethodComparison
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.vit import Head
from flops.training.methods import METHODS, MethodName

DEFAULTS = FinetuneConfig()


@dataclass(frozen=True)
class Compare:
    """Compare methods: accuracy at equal cost, and accuracy and cost at equal epochs.

    Every method's learning rate and sigma are chosen by the same small sweep on the validation
    split; pass one of each to skip the sweep. Each run is saved when it completes, and the same
    command resumes the comparison. Writes tables.md, results.json and accuracy.png.

    For example:

    $ flops compare --methods bp lr ops-lr shaped-lr --seeds 1 --epochs 3
    $ flops compare --methods lr ops-lr --learning-rates 1e-3 --sigmas 1e-3
    $ flops compare --data path/to/images --model google/vit-base-patch16-224 --seeds 3
    """

    methods: tuple[MethodName, ...] = METHODS
    """Methods, in the order of the tables."""
    seeds: int = 5
    """Number of reported seeds per method."""
    epochs: int = 8
    """Epochs of table (b)."""
    budget: float | None = None
    """Forward equivalents of table (a); None for the cost of the epochs with the most expensive
    forward method."""
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    """Learning rates of the sweep."""
    sigmas: tuple[float, ...] = (1e-2, 1e-3)
    """Noise scales of the sweep."""
    sweep_epochs: int = 2
    """Length of a run of the sweep, in epochs of the most expensive method."""
    model: str = DEFAULTS.model
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = DEFAULTS.head
    """A new classification head, or the model's own if it was trained on the same classes."""
    data: str = DEFAULTS.data
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    queries: float = DEFAULTS.queries
    """Mean queries per point and group."""
    batch: int = DEFAULTS.batch
    """Batch size."""
    targets: Targets | None = None
    """What likelihood ratio methods perturb; None for the default of each."""
    limit: int | None = None
    """Largest number of points per split, for quick runs."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    output: Path = Path("runs/compare")
    """Folder of results, tables and plot."""

    def run(self) -> None:
        """Measure, print and write."""
        if not (self.learning_rates and self.sigmas):
            raise FlopsError("pass at least one of --learning-rates and of --sigmas")
        if min(self.seeds, self.epochs, self.sweep_epochs) < 1 or self.workers < 0:
            raise FlopsError("seeds, epochs, sweep-epochs must be at least 1, workers at least 0")
        base = FinetuneConfig(
            model=self.model,
            head=self.head,
            data=self.data,
            queries=self.queries,
            batch=self.batch,
            limit=self.limit,
            budget=self.budget,
            targets=self.targets,
        )
        compare.main(
            MethodComparison(
                self.methods,
                self.seeds,
                self.epochs,
                self.budget,
                self.learning_rates,
                self.sigmas,
                self.sweep_epochs,
                base,
                self.output,
                self.workers,
                Console(),
            )
        )
