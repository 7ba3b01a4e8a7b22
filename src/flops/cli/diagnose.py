"""`flops diagnose`: quality of gradient estimates, on the bundled model or on one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from flops.diagnostics.table import diagnosis_tables
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.task_diagnosis import diagnose_task
from flops.report.table import print_table
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.models.vit import Head
from flops.tasks.text import TextConfig
from flops.training.console import Lines


@dataclass(frozen=True)
class Diagnose:
    """Diagnose gradient estimates by group: of the bundled ViT, or of your own model and data.

    Prints, for every third of the layers and every allocator, the cosine to the exact gradient
    (mean and standard deviation over repeats), J relative to the optimal allocation, the
    signal-to-noise ratio and the cost; and a sweep over sigma with the recommended one. In code,
    flops.diagnose takes any model and groups.

    For example:

    $ flops diagnose
    $ flops diagnose --steps 150 --targets stage --queries 8
    $ flops diagnose --steps 150 --targets stage --shaping
    $ flops diagnose --model google/vit-base-patch16-224-in21k --data path/to/images
    $ flops diagnose --model runs/mine/model --head kept --data path/to/images
    $ flops diagnose --task text --model path/to/model --data reviews.jsonl --batch 8
    $ flops diagnose --estimator spsa --json > spsa.json
    """

    task: Literal["image", "text"] = "image"
    """What is diagnosed: an image classifier, or a language model."""
    model: str = "bundled"
    """The bundled model, a model id of the hub, or a folder; as of finetune."""
    head: Head = "fresh"
    """Of images: a new classification head, or the model's own if it was trained on the same
    classes."""
    data: str | None = None
    """The data, as of finetune; None for the embedded digits, or garments for texts."""
    columns: tuple[str, ...] = ()
    """Of texts: names of the fields, such as text=sentence label=class."""
    template: str | None = None
    """Of texts: prompt around the text, such as "{text} It was"; None for that of the data."""
    words: tuple[str, ...] = ()
    """Of texts: label words, such as "negative= terrible" "positive= great"."""
    lora: int | None = None
    """Of texts: rank of LoRA adapters; None for the model itself."""
    limit: int | None = None
    """Largest number of points per split; None for all."""
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
    """Steps of backpropagation before measuring: for the digits 0 is a fresh head, and 150 is near
    convergence."""
    repeats: int = 8
    """Estimates per group and allocator."""
    seed: int = 0
    """Seed of the noise."""
    chunk: int | None = None
    """Largest number of rows per pass of queries; None for a default."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    json: bool = False
    """Print JSON instead of tables."""

    def config(self) -> FinetuneConfig | TextConfig:
        """Model and data.

        Raises:
            ConfigError: If a value is not allowed.
        """
        shared: dict[str, Any] = {
            "model": self.model,
            "limit": self.limit,
            "batch": self.batch,
            "seed": self.seed,
            "chunk": self.chunk,
            "device": self.device,
        }
        if self.data is not None:
            shared["data"] = self.data
        if self.task == "text":
            return TextConfig(
                **shared,
                columns=self.columns,
                template=self.template,
                words=self.words,
                lora=self.lora,
            )
        return FinetuneConfig(**shared, head=self.head)

    def run(self) -> None:
        """Measure and print."""
        console = Console(stderr=self.json)
        with (
            Lines(Console(stderr=True)).warnings(),
            console.status("measuring") if console.is_terminal else nullcontext(),
        ):
            found = diagnose_task(
                self.config(),
                self.estimator,
                self.targets,
                shaping=self.shaping,
                sigma=self.sigma,
                queries=self.queries,
                steps=self.steps,
                repeats=self.repeats,
            )
        if self.json:
            sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
            return
        for table in diagnosis_tables(found):
            print_table(console, table)


def command(arguments: Sequence[str]) -> tuple[type[Diagnose], None]:
    """The command's type for tyro."""
    return Diagnose, None
