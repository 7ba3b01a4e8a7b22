"""`flops study robustness`: the options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flops.errors import FlopsError
from flops.experiments import robustness
from flops.experiments.robustness_runs import FinishedRun, read_runs
from flops.experiments.robustness_training import DEFAULT_METHODS, plan_trainings, train_models
from flops.experiments.robustness_trials import Strengths
from flops.tasks.classification.config import FinetuneConfig
from flops.training.methods import MethodName

QUICK: dict[str, Any] = {
    "seeds": 1,
    "epochs": 1,
    "limit": 64,
    "queries": 2.0,
    "batch": 32,
    "bounds": (8.0, 32.0),
    "steps": 2,
    "workers": 0,
    "output": Path("runs/robustness-quick"),
}
DEFAULTS = FinetuneConfig()


@dataclass(frozen=True)
class Robustness:
    """Measure robustness: test accuracy under natural noise and adversarial attacks.

    The models are finished runs of `flops finetune`, or are trained here. Each training and each
    trial is kept as soon as it is done, and the same command continues where it was stopped. Writes
    tables.md, results.json, results.csv and bounds.png.

    For example:

    $ flops study robustness
    $ flops study robustness --runs runs/digits-bp-seed* runs/digits-ops-lr-seed*
    $ flops study robustness --methods bp shaped-lr --seeds 3 --sigmas shaped-lr=1e-2
    $ flops study robustness --quick
    """

    runs: tuple[Path, ...] = ()
    """Folders of finished runs, of the same model and data; none trains here."""
    methods: tuple[MethodName, ...] | None = None
    """To train here, if no runs are given; None is bp, ops-lr, ops-spsa and shaped-lr."""
    seeds: int = 5
    """Models of each method, trained here."""
    epochs: int = 6
    """Epochs, of models trained here."""
    learning_rates: tuple[str, ...] = ()
    """Instead of those that the sweep chose for the digits and the bundled model (bp 1e-3, ops-lr
    1e-3, ops-spsa 3e-3, shaped-lr 1e-3), such as bp=3e-4 ops-lr=3e-3."""
    sigmas: tuple[str, ...] = ()
    """Instead of those that the sweep chose for these (ops-lr 1e-2, ops-spsa 1e-3, shaped-lr
    1e-3), such as ops-lr=1e-3."""
    model: str | None = None
    """Of models trained here: bundled (None), a model id of the hub, a folder, or
    random:vit-base."""
    data: str | None = None
    """Of models trained here: digits (None), another named data set, a data set id of the hub, or
    a folder."""
    queries: float = DEFAULTS.queries
    """Mean queries per point and group, of models trained here."""
    batch: int = DEFAULTS.batch
    """Points of a batch, of models trained here."""
    gaussian: float = 0.1
    """Standard deviation of Gaussian noise, of pixels in [0, 1]."""
    uniform: float = 0.1
    """Half the width of uniform noise."""
    poisson: float = 100.0
    """Poisson noise: mean count of a white pixel; less is more noise."""
    bound: float = 8.0
    """Largest change of a pixel by the attacks of the table, in 1/255."""
    bounds: tuple[float, ...] = (8.0, 16.0, 32.0)
    """Those of the figure; empty for none."""
    steps: int = 5
    """Iterations of I-FGSM and MI-FGSM."""
    noise_seed: int = 0
    """Of natural noise, the same for all models."""
    limit: int | None = None
    """Most points of each split, for a quick look; of the test split alone for given runs."""
    quick: bool = False
    """A look in less than a minute, in a folder of its own: one seed, one epoch, few points, where
    these are at their defaults."""
    workers: int = 2
    """Processes, of one thread each; 0 runs in this one."""
    output: Path = Path("runs/robustness")
    """Folder of models, results, tables and figure."""

    def run(self) -> None:
        """Measure, print and write."""
        if self.quick:
            defaults = {f.name: f.default for f in dataclasses.fields(self)}
            left = {n: v for n, v in QUICK.items() if getattr(self, n) == defaults[n]}
            return dataclasses.replace(self, **left, quick=False).run()
        if min(self.seeds, self.epochs) < 1 or self.workers < 0:
            raise FlopsError("seeds and epochs must be at least 1, workers at least 0")
        if self.limit is not None and self.limit < 1:
            raise FlopsError(f"--limit must be at least 1, or None, not {self.limit}")
        strengths = Strengths(
            self.gaussian,
            self.uniform,
            self.poisson,
            self.bound,
            self.bounds,
            self.steps,
            self.noise_seed,
        )
        study = robustness.RobustnessStudy(
            self.output, strengths, self.limit, self.workers, Console()
        )
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # not after hours
            raise FlopsError(f"cannot write to {self.output}: {error.strerror}") from error
        robustness.main(self._given() if self.runs else self._trained(study.console), study)
        return None

    def _given(self) -> list[FinishedRun]:
        if self.methods is not None or self.learning_rates or self.sigmas:
            raise FlopsError(
                "--runs are trained already: leave out --methods, --learning-rates and --sigmas, "
                "or leave out --runs to train here"
            )
        return read_runs(self.runs, model=self.model, data=self.data)

    def _trained(self, console: Console) -> list[FinishedRun]:
        trainings = plan_trainings(
            DEFAULT_METHODS if self.methods is None else self.methods,
            self.seeds,
            learning_rates=self.learning_rates,
            sigmas=self.sigmas,
            epochs=self.epochs,
            model=self.model or DEFAULTS.model,
            data=self.data or DEFAULTS.data,
            queries=self.queries,
            batch=self.batch,
            limit=self.limit,
        )
        return train_models(trainings, self.output, self.workers, console)
