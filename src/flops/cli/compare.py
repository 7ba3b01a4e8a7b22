"""`flops compare`: the tables of the paper's section 5.1, for any model and data; and for texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from flops.cli.training import chosen_preset, chosen_task
from flops.errors import FlopsError
from flops.estimators.likelihood_ratio import Targets
from flops.experiments import compare
from flops.experiments.compare_methods import ZERO_SHOT
from flops.experiments.compare_runs import MethodComparison
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.vit import Head
from flops.tasks.text import TextConfig
from flops.tasks.text.config import Objective, TextPreset
from flops.training.methods import METHODS, MethodName

DEFAULTS = FinetuneConfig()
TEXT = TextConfig()
# Of those that there are; DeepZero prunes every matrix first, n-spsa and ops-spsa are of images.
WANTED = ("bp", "bp+lora", "mezo", "fzoo", "lozo", "lr", "ops-lr", "shaped-lr", "shaped-lr+lora")
TEXT_METHODS = (ZERO_SHOT, *(m for m in WANTED if m.partition("+")[0] in METHODS))
# All layers, a small batch, a short sweep, 24 steps: two hours on two cores. The budget is what
# these steps cost shaped-lr; lr and ops-lr, which cost three times as much, are run on request.
TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "smollm2": {
        "model": "smollm2",
        "data": "sentences",
        "methods": tuple(m for m in TEXT_METHODS if m not in ("lr", "ops-lr")),
        "steps": 24,
        "sweep_steps": 6,
        "margin": 0.15,
        "curve": 3,
        "budget": 1_900.0,
        "seeds": 3,
        "learning_rates": (5e-6, 2e-5, 2e-4, 2e-3, 1e-2),
        "sigmas": (1e-3,),  # that of MeZO's authors; shaped-lr finds its own
        "validation_points": 200,
        "batch": 8,
        "queries": 16.0,
        "chunk": 8,
        "train_last": 30,
        "max_tokens": 32,
        "output": Path("runs/compare-smollm2"),
    },
}


@dataclass(frozen=True)
class Compare:
    """Compare methods: accuracy at equal cost, and accuracy and cost at equal epochs.

    Every method's learning rate and sigma are chosen by the same small sweep on the validation
    split; pass one of each to skip the sweep. Each run is saved when it completes, and the same
    command resumes the comparison. Writes tables.md, results.json and accuracy.png. With --task
    text, language models are compared: see flops compare --task text --help.

    For example:

    $ flops compare --methods bp lr ops-lr shaped-lr --seeds 1 --epochs 3
    $ flops compare --methods lr ops-lr --learning-rates 1e-3 --sigmas 1e-3
    $ flops compare --data path/to/images --model google/vit-base-patch16-224 --seeds 3
    $ flops compare --task text --preset smollm2  # after make real-models
    """

    task: Literal["image", "text"] = "image"
    """What is trained: image classifiers, or language models."""
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
    queries: float | Literal["auto"] = DEFAULTS.queries
    """Mean queries per point and group; auto chooses them step by step (not for deepzero), so that
    a budget of None, from the first two steps, is only about what the epochs cost."""
    batch: int = DEFAULTS.batch
    """Batch size."""
    targets: Targets | None = None
    """What likelihood ratio methods perturb; None for the default of each."""
    limit: int | None = None
    """Largest number of points per split, for quick runs."""
    device: str = DEFAULTS.device
    """cpu, cuda, or auto: a GPU if available."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    output: Path = Path("runs/compare")
    """Folder of results, tables and plot."""

    def run(self) -> None:
        """Measure, print and write."""
        _check(self, "epochs", "sweep_epochs")
        base = FinetuneConfig(
            model=self.model,
            head=self.head,
            data=self.data,
            queries=self.queries,
            batch=self.batch,
            limit=self.limit,
            budget=self.budget,
            targets=self.targets,
            device=self.device,
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


@dataclass(frozen=True)
class CompareText:
    """Compare methods on texts: accuracy at equal cost, and accuracy and cost at equal steps.

    A method with +lora trains adapters, with +last4 the last four layers, with +all everything;
    else what --train-last says. zero-shot is the unmodified model. Every method's learning rate and
    sigma are chosen by the same small sweep on the validation split; pass one of each to skip the
    sweep. Each run is saved when it completes, and the same command resumes the comparison. Writes
    tables.md, results.json and accuracy.png. Without --task text: images, see flops compare --help.

    For example:

    $ flops compare --task text --seeds 1 --steps 20
    $ flops compare --task text --methods zero-shot bp mezo mezo+all shaped-lr+lora
    $ flops compare --task text --preset smollm2  # after make real-models
    $ flops compare --task text --data reviews.jsonl --model path/to/model --train-last 8
    """

    task: Literal["image", "text"] = "text"
    """What is trained: image classifiers, or language models."""
    preset: TextPreset | None = None
    """Preset of settings: tiny, or SmolLM2-135M on the sentences. Other options override it."""
    methods: tuple[str, ...] = TEXT_METHODS
    """Methods, in the order of the tables."""
    seeds: int = 3
    """Number of reported seeds per method."""
    steps: int = 40
    """Steps of table (b)."""
    budget: float | None = None
    """Forward equivalents of table (a); None for the cost of the steps with the most expensive
    forward method."""
    learning_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Learning rates of the sweep."""
    sigmas: tuple[float, ...] = (1e-2, 1e-3)
    """Noise scales of the sweep."""
    sweep_steps: int = 10
    """Length of a run of the sweep, in steps of the most expensive method."""
    margin: float = 0.25
    """The two best learning rates are compared by full runs if their accuracies after the short
    ones are this close."""
    curve: int = 5
    """Evaluations of a reported run, for the plot."""
    model: str = TEXT.model
    """The bundled tiny Llama, smollm2 (after make real-models), a GGUF file, a folder, or a model
    id of the hub."""
    data: str = TEXT.data
    """The embedded garments, sentences (after make real-models), a .jsonl file, a folder with a
    .jsonl file per split, parquet files, or a data set id of the hub."""
    data_config: str | None = None
    """Configuration of a data set of the hub that has several."""
    columns: tuple[str, ...] = ()
    """Names of the fields, such as text=sentence label=class."""
    splits: tuple[str, ...] = ()
    """Which splits of a data set to use, such as validation=none test=validation."""
    objective: Objective | None = None
    """As of flops finetune --task text."""
    template: str | None = None
    """Prompt around the text, such as "{text} It was"; None for that of the data."""
    words: tuple[str, ...] = ()
    """Label words, such as "negative= terrible" "positive= great"."""
    validation_points: int | None = None
    """Validate on so many texts, the first of the split; None for all."""
    max_tokens: int = TEXT.max_tokens
    """Longest text in tokens, prompt included; the left of a longer one is cut."""
    lora: int = 8
    """Rank of the adapters of methods with +lora."""
    train_last: int | None = None
    """Layers to train, the last ones; None for all, with the embeddings."""
    stages: int | None = TEXT.stages
    """Number of groups of layers; None for the method's default."""
    queries: float | Literal["auto"] = 10.0
    """Mean queries per point and group; auto chooses them step by step (not for deepzero), so that
    a budget of None, from the first two steps, is only about what the steps cost."""
    batch: int = TEXT.batch
    """Batch size."""
    targets: Targets | None = None
    """What likelihood ratio methods perturb; None for the default of each."""
    chunk: int | None = None
    """Largest number of rows per pass of queries; None for a default."""
    limit: int | None = None
    """Largest number of points per split, for quick runs."""
    device: str = DEFAULTS.device
    """cpu, cuda, or auto: a GPU if available."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    output: Path = Path("runs/compare-text")
    """Folder of results, tables and plot."""

    def run(self) -> None:
        """Measure, print and write."""
        _check(self, "steps", "sweep_steps", "curve", "lora")
        base = TextConfig(
            model=self.model,
            data=self.data,
            data_config=self.data_config,
            columns=self.columns,
            splits=self.splits,
            objective=self.objective,
            template=self.template,
            words=self.words,
            max_tokens=self.max_tokens,
            validation_points=self.validation_points,
            train_last=self.train_last,
            stages=self.stages,
            queries=self.queries,
            batch=self.batch,
            targets=self.targets,
            chunk=self.chunk,
            limit=self.limit,
            budget=self.budget,
            device=self.device,
        )
        compare.main(
            MethodComparison(
                self.methods,
                self.seeds,
                self.steps,
                self.budget,
                self.learning_rates,
                self.sigmas,
                self.sweep_steps,
                base,
                self.output,
                self.workers,
                Console(),
                self.lora,
                self.margin,
                self.curve,
            )
        )


Command = Compare | CompareText
COMMANDS: Mapping[str, type[Command]] = {"image": Compare, "text": CompareText}


def command(arguments: Sequence[str]) -> tuple[type[Command], Command | None]:
    """The command's type for tyro, by task, with the defaults of its preset.

    Raises:
        ConfigError: If there is no such task or preset.
    """
    if chosen_task(arguments, tuple(COMMANDS)) != "text":
        return Compare, None
    preset = chosen_preset(arguments, TEXT_PRESETS)
    return CompareText, dataclasses.replace(CompareText(), **preset)


def _check(given: Command, *lengths: str) -> None:
    """Check numbers before anything is loaded."""
    if not (given.learning_rates and given.sigmas):
        raise FlopsError("pass at least one of --learning-rates and of --sigmas")
    numbers = [getattr(given, name) for name in ("seeds", *lengths)]
    if min(numbers) < 1 or given.workers < 0:
        names = ", ".join(name.replace("_", "-") for name in ("seeds", *lengths))
        raise FlopsError(f"{names} must be at least 1, workers at least 0")
