"""`flops study robustness`: the options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from flops.errors import FlopsError
from flops.experiments import robustness
from flops.experiments.robustness_runs import FinishedRun, read_runs
from flops.experiments.robustness_training import (
    DEFAULT_METHODS,
    ModelTraining,
    plan_trainings,
    train_models,
)
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
    trial is saved when it completes, and the same command resumes the study. Writes tables.md,
    results.json, results.csv and bounds.png.

    For example:

    $ flops study robustness
    $ flops study robustness --runs runs/digits-bp-seed* runs/digits-ops-lr-seed*
    $ flops study robustness --methods bp shaped-lr --seeds 3 --sigmas shaped-lr=1e-2
    $ flops study robustness --quick
    """

    runs: tuple[Path, ...] = ()
    """Folders of finished runs with the same model and data; empty to train models here."""
    methods: tuple[MethodName, ...] | None = None
    """Methods to train, without --runs; None for bp, ops-lr, ops-spsa and shaped-lr."""
    seeds: int = 5
    """Number of seeds per method, for models trained here."""
    epochs: int = 6
    """Epochs, for models trained here."""
    learning_rates: tuple[str, ...] = ()
    """Learning rates, such as bp=3e-4 ops-lr=3e-3; the defaults were chosen by the sweep for the
    digits and the bundled model (bp 1e-3, ops-lr 1e-3, ops-spsa 3e-3, shaped-lr 1e-3)."""
    sigmas: tuple[str, ...] = ()
    """Noise scales, such as ops-lr=1e-3; the defaults were chosen by the same sweep (ops-lr 1e-2,
    ops-spsa 1e-3, shaped-lr 1e-3)."""
    model: str | None = None
    """Model to train here: bundled (None), a model id of the hub, a folder, or random:vit-base."""
    data: str | None = None
    """Data of models trained here: digits (None), another named data set, a data set id of the
    hub, or a folder."""
    queries: float = 20.0
    """Mean queries per point and group, for models trained here."""
    batch: int = DEFAULTS.batch
    """Batch size, for models trained here."""
    gaussian: float = 0.1
    """Standard deviation of Gaussian noise, of pixels in [0, 1]."""
    uniform: float = 0.1
    """Half width of uniform noise."""
    poisson: float = 100.0
    """Poisson noise: mean count of a white pixel; lower means more noise."""
    bound: float = 8.0
    """Bound of the attacks in the table, in 1/255."""
    bounds: tuple[float, ...] = (8.0, 16.0, 32.0)
    """Bounds of the attacks in the figure; empty for no figure."""
    steps: int = 5
    """Iterations of I-FGSM and MI-FGSM."""
    noise_seed: int = 0
    """Seed of natural noise, the same for all models."""
    limit: int | None = None
    """Largest number of points per split, for quick runs; with --runs, of the test split only."""
    device: str = DEFAULTS.device
    """cpu, cuda, or auto: a GPU if available; runs given by --runs keep theirs."""
    quick: bool = False
    """A preview in less than a minute, in a separate folder: one seed, one epoch and few points,
    unless set explicitly."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    output: Path = Path("runs/robustness")
    """Folder of models, results, tables and figure."""

    def run(self) -> None:
        """Measure, print and write."""
        if self.quick:
            return self.quick_look().run()
        if min(self.seeds, self.epochs) < 1 or self.workers < 0:
            raise FlopsError("seeds and epochs must be at least 1, workers at least 0")
        if self.limit is not None and self.limit < 1:
            raise FlopsError(f"--limit must be at least 1, or None, not {self.limit}")
        study = self.study()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # early, not after hours
            raise FlopsError(f"cannot write to {self.output}: {error.strerror}") from error
        robustness.main(self._given() if self.runs else self._trained(study.console), study)
        return None

    def quick_look(self) -> Self:
        """These options, with smaller values of those at their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        left = {n: v for n, v in QUICK.items() if getattr(self, n) == defaults[n]}
        return dataclasses.replace(self, **left, quick=False)

    def study(self) -> robustness.RobustnessStudy:
        """Settings of the study."""
        strengths = Strengths(
            self.gaussian,
            self.uniform,
            self.poisson,
            self.bound,
            self.bounds,
            self.steps,
            self.noise_seed,
        )
        return robustness.RobustnessStudy(
            self.output, strengths, self.limit, self.workers, Console()
        )

    def _given(self) -> list[FinishedRun]:
        if self.methods is not None or self.learning_rates or self.sigmas:
            raise FlopsError(
                "--runs are already trained: leave out --methods, --learning-rates and --sigmas, "
                "or leave out --runs to train here"
            )
        return read_runs(self.runs, model=self.model, data=self.data)

    def _trained(self, console: Console) -> list[FinishedRun]:
        return train_models(self.trainings(), self.output, self.workers, console)

    def trainings(self) -> list[ModelTraining]:
        """The trainings, without --runs."""
        return plan_trainings(
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
            device=self.device,
        )
