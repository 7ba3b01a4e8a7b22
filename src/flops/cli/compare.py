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
    """Compare methods: accuracy at equal cost, and at equal epochs with the cost beside it.

    Every method's learning rate and sigma are chosen by the same small sweep on the validation
    split; give one of each to leave the sweep out. Each run is kept as soon as it is done, and the
    same command continues where it was stopped. Writes tables.md, results.json and accuracy.png.

    For example:

    $ flops compare --methods bp lr ops-lr shaped-lr --seeds 1 --epochs 3
    $ flops compare --methods lr ops-lr --learning-rates 1e-3 --sigmas 1e-3
    $ flops compare --data path/to/images --model google/vit-base-patch16-224 --seeds 3
    """

    methods: tuple[MethodName, ...] = METHODS
    """Which ones, in the order of the tables."""
    seeds: int = 5
    """Runs of each method that are reported."""
    epochs: int = 8
    """Epochs of table (b)."""
    budget: float | None = None
    """Forward equivalents of table (a); None is what the most expensive forward method takes for
    the epochs."""
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    """To choose from."""
    sigmas: tuple[float, ...] = (1e-2, 1e-3)
    """To choose from."""
    sweep_epochs: int = 2
    """Length of a run of the sweep, in epochs of the most expensive method."""
    model: str = DEFAULTS.model
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = DEFAULTS.head
    """A fresh classification head, or the model's own kept, if it knows the classes of the data."""
    data: str = DEFAULTS.data
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    queries: float = DEFAULTS.queries
    """Mean queries per point and group."""
    batch: int = DEFAULTS.batch
    """Points of a batch."""
    targets: Targets | None = None
    """What all methods of likelihood ratio perturb; None is each one's own choice."""
    limit: int | None = None
    """Most points of each split, for a quick look."""
    workers: int = 2
    """Processes, of one thread each; 0 runs in this one."""
    output: Path = Path("runs/compare")
    """Folder of results, tables and plot."""

    def run(self) -> None:
        """Measure, print and write."""
        if not (self.learning_rates and self.sigmas):
            raise FlopsError("give at least one of --learning-rates and of --sigmas")
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
