"""Settings of a comparison, and one run of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from flops.errors import FlopsError, NonFiniteLossError
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.cells import Result
from flops.experiments.compare_methods import BP, Variant, variant
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.vit import Head
from flops.tasks.models.weights import weights_digest
from flops.tasks.text import TextConfig
from flops.tasks.text.config import Objective
from flops.training.config import RunConfig
from flops.training.loop import peak_memory, train
from flops.training.progress import Evaluation, budget_mark, epoch_mark, step_mark
from flops.training.trainer import Trainer

Unit = Literal["epochs", "steps"]
OF_TEXTS = (
    "train_last",
    "max_tokens",
    "stages",
    "chunk",
    "template",
    "words",
    "objective",
    "columns",
    "splits",
    "data_config",
    "validation_points",
)


@dataclass(frozen=True)
class ComparisonRun:
    """One run of one method; the settings of a cell."""

    method: str
    learning_rate: float
    sigma: float | None
    epochs: int
    budget: float | None
    model: str
    data: str
    queries: float | Literal["auto"]
    batch: int
    test: bool
    limit: int | None = None
    seed: int = 0
    targets: Targets | None = None
    head: Head = "fresh"
    weights: str = ""  # digest of a model folder
    device: str = "auto"

    @property
    def variant(self) -> Variant:
        """The method and what it trains."""
        return variant(self.method)

    @property
    def length(self) -> tuple[str, str]:
        """Key of the result at the end of the epochs or steps, and their mark."""
        return "at_epochs", epoch_mark(self.epochs)

    def config(self) -> RunConfig:
        """Configuration of a training run without a run directory."""
        return FinetuneConfig(
            model=self.model,
            head=self.head,
            evaluate_every=1,
            epochs=self.epochs,
            **self.shared(),
        )

    def shared(self) -> dict[str, Any]:
        """Settings of all tasks."""
        name = self.variant.name or BP
        return {
            "data": self.data,
            "limit": self.limit,
            "method": name,
            "queries": self.queries,
            "sigma": None if self.sigma is None else (self.sigma,),
            "targets": self.targets if "lr" in name else None,
            "budget": self.budget,
            "until": "last",
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "test": self.test,
            "device": self.device,
        }


@dataclass(frozen=True)
class TextComparisonRun(ComparisonRun):
    """One run on texts, whose length is in steps."""

    steps: int = 1
    curve: int = 0  # evaluations before the end, evenly over steps and budget
    lora: int = 8
    train_last: int | None = None
    max_tokens: int = 128
    stages: int | None = None
    chunk: int | None = None
    template: str | None = None
    words: tuple[str, ...] = ()
    objective: Objective | None = None
    columns: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    data_config: str | None = None
    validation_points: int | None = None

    @property
    def length(self) -> tuple[str, str]:
        """Key of the result at the end of the epochs or steps, and their mark."""
        return "at_steps", step_mark(self.steps)

    def config(self) -> RunConfig:
        """Configuration of a training run without a run directory."""
        kind = self.variant
        last = None if kind.everything else kind.last or self.train_last
        shares = [i / (self.curve + 1) for i in range(1, self.curve + 1)]
        budget = self.budget or 0.0
        return TextConfig(
            model=self.model,
            epochs=None,
            steps=self.steps,
            evaluate_every=None,
            marks=tuple(budget * share for share in shares if budget),
            evaluate_steps=max(1, self.steps // (self.curve + 1)) if not budget else None,
            lora=self.lora if kind.lora else None,
            **{name: getattr(self, name) for name in OF_TEXTS} | {"train_last": last},
            **self.shared(),
        )


def measure(run: ComparisonRun) -> Result:
    """Train; return all evaluations and the two that are compared."""
    key, mark = run.length
    if run.variant.name is None:
        start = _unmodified(run)
        at: Result = {key: start, "at_budget": start}
        return {**at, "curve": [start], "peak_memory": peak_memory()}
    found = train(run.config())
    marks = {mark: e for e in found.evaluations for mark in e.marks}
    result: Result = {key: marks[mark].to_dict()}
    if run.budget is not None:
        result["at_budget"] = marks[budget_mark(run.budget)].to_dict()
    curve = [e.to_dict() for e in found.evaluations]
    return {**result, "curve": curve, "peak_memory": found.peak_memory}


def _unmodified(run: ComparisonRun) -> dict[str, Any]:
    """Evaluation of the model before the first step."""
    trainer = Trainer(run.config())
    task, data, ranks = trainer.task, trainer.data, trainer.ranks
    accuracy, loss = task.measure(data.validation, ranks)
    test = task.measure(data.test, ranks)[0] if run.test else None
    return Evaluation(0, 0.0, accuracy, loss, 0, 0.0, 0.0, (step_mark(0),), test).to_dict()


def measure_sweep_run(run: ComparisonRun) -> Result:
    """As `measure`, for a run of the sweep, which may diverge."""
    try:
        return measure(run)
    except NonFiniteLossError:
        return {"diverged": True}


def describe(result: Result) -> str:
    """Accuracy of a run at the end of its budget or length, for its line."""
    if result.get("diverged"):
        return "diverged"
    at = result.get("at_budget") or result.get("at_steps") or result["at_epochs"]
    return f"validation accuracy {at['accuracy']:.1%}"


def _weights(model: str) -> str:
    try:
        return weights_digest(model)
    except OSError as error:
        raise FlopsError(f"cannot read {error.filename}: {error.strerror}") from error


@dataclass(frozen=True)
class MethodComparison:
    """Settings of a comparison.

    Attributes:
        methods: Methods, in the order of the tables; see `compare_methods`.
        seeds: Number of reported seeds.
        length: Epochs (or steps) of table (b).
        budget: Forward equivalents of table (a); None for the cost of this length with the most
            expensive forward method.
        learning_rates: Candidates of the sweep; a single one is not swept.
        sigmas: Candidates of the sweep.
        sweep_length: Epochs (or steps) of a run of the sweep.
        base: Model, data, queries, batch, limit, targets and what is trained.
        folder: Folder of the results.
        workers: Processes, with one thread each.
        lora: Rank of the adapters of methods with +lora.
        margin: Accuracy after a short run within which the two best rates are compared by full
            runs: differences of +10 points have become -20.
        curve: Evaluations of a reported run whose length is in steps.
    """

    methods: tuple[str, ...]
    seeds: int
    length: int
    budget: float | None
    learning_rates: tuple[float, ...]
    sigmas: tuple[float, ...]
    sweep_length: int
    base: FinetuneConfig | TextConfig
    folder: Path
    workers: int
    console: Console
    lora: int = 8
    margin: float = 0.25
    curve: int = 5

    @property
    def unit(self) -> Unit:
        """Unit of the length: images have epochs, texts steps."""
        return "steps" if isinstance(self.base, TextConfig) else "epochs"

    @property
    def at_length(self) -> str:
        """Key of the results of table (b)."""
        return f"at_{self.unit}"

    def run(
        self,
        method: str,
        learning_rate: float,
        sigma: float,
        *,
        length: int | None = None,
        **changed: Any,
    ) -> ComparisonRun:
        """A run of a method; backpropagation has no sigma.

        Args:
            method: The method.
            learning_rate: Learning rate.
            sigma: Noise scale.
            length: Epochs or steps; None for those of the comparison.
            changed: Other settings of the run.
        """
        base, length = self.base, length or self.length
        shared: dict[str, Any] = {
            "method": method,
            "learning_rate": learning_rate,
            "sigma": sigma if variant(method).has_sigma else None,
            "epochs": length,
            "budget": self.budget or 1.0,
            "model": base.model,
            "data": base.data,
            "queries": base.queries,
            "batch": base.batch,
            "test": False,
            "limit": base.limit,
            "targets": base.targets,
            "weights": _weights(base.model),
            "device": base.device,
        }
        given: ComparisonRun
        if isinstance(base, TextConfig):
            shared["epochs"] = 0  # without meaning
            more = {name: getattr(base, name) for name in OF_TEXTS}
            given = TextComparisonRun(**shared, steps=length, lora=self.lora, **more)
        else:
            given = ComparisonRun(**shared, head=base.head)
        return dataclasses.replace(given, **changed)

    def reported(self, method: str, learning_rate: float, sigma: float, seed: int) -> ComparisonRun:
        """A run for the tables: with a test, and with a curve."""
        more = {"curve": self.curve - 1} if isinstance(self.base, TextConfig) else {}
        return self.run(method, learning_rate, sigma, seed=seed, test=True, **more)
