"""`flops study`: measurements of the claims of the paper and of this library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from flops.cli.robustness import Robustness
from flops.experiments import gradients, shaped, theorem
from flops.experiments.gradients_panel import Panel
from flops.tasks.models.vit import Head
from flops.tasks.models.weights import weights_digest


@dataclass(frozen=True)
class Theorem:
    """Check Theorems 1 and 2 on a model with traces in closed form."""

    repeats: int = 1000
    """Estimates per allocation."""
    seed: int = 0
    """Seed of the problem and of the noise."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""

    def run(self) -> None:
        """Measure and print."""
        theorem.main(self.repeats, self.seed, self.device)


@dataclass(frozen=True)
class Shaped:
    """Measure shaped noise: cosines, cost, defaults, accuracy, other problems, ablations.

    Every run is saved when it completes; the same command resumes the study.

    For example:

    $ flops study shaped
    $ flops study shaped --parts main problems --seeds 2
    $ flops study shaped --parts text --seeds 3  # SmolLM2, after make real-models
    $ flops study shaped --parts main --seeds 1 --most 20 --output runs/look
    """

    parts: tuple[shaped.Part, ...] = shaped.PARTS
    """Parts of the study; text, which needs make real-models, only on request."""
    seeds: int = 5
    """Number of seeds of all parts but grid."""
    grid_seeds: int = 1
    """Number of seeds of grid."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    most: int | None = None
    """Largest number of training steps per run, for quick runs; None for all."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    output: Path = Path("runs/shaped")
    """Folder of results, tables and plots."""

    def run(self) -> None:
        """Measure, print and write."""
        shaped.main(self.parts, self.study())

    def study(self) -> shaped.ShapedStudy:
        """Settings of the study."""
        return shaped.ShapedStudy(
            self.output,
            self.seeds,
            self.grid_seeds,
            self.workers,
            Console(),
            self.most,
            self.device,
        )


@dataclass(frozen=True)
class Gradients:
    """Measure the cosine to the exact gradient by budget, allocator, estimator, matrix and layer.

    The ablations of the paper, on any vision transformer. Every panel is saved when it completes;
    the same command resumes the study.

    For example:

    $ flops study gradients
    $ flops study gradients --quick
    $ flops study gradients --parts matrices --layers 1 6 --budgets 20 --estimators lr
    $ flops study gradients --model runs/mine/model --head kept --stages 0 --data fashion-mnist
    """

    parts: tuple[Literal["matrices", "kernel", "targets", "baselines"], ...] = (
        "matrices",
        "kernel",
        "targets",
        "baselines",
    )
    """Parts of the study: the paper's panels, and ablations on thirds of the layers."""
    model: str = "bundled"
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = "fresh"
    """A new classification head, or the model's own if it was trained on the same classes."""
    data: str = "digits"
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    limit: int | None = None
    """Largest number of points per split; None for all."""
    stages: tuple[int, ...] = (20, 150)
    """Stages of training, as steps of backpropagation before measuring."""
    learning_rate: float = 1e-3
    """Learning rate of Adam in these steps."""
    estimators: tuple[str, ...] = ("lr", "spsa")
    """Estimators: lr, spsa, es."""
    matrices: tuple[str, ...] = ("key", "ff")
    """Matrices: query, key, value, output, ff, ff2, or the name of a linear module in a layer."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """Layers: first, middle, last, or numbers from 1 on."""
    allocators: tuple[str, ...] = ("equal", "bernoulli", "gaussian", "neyman")
    """Allocators: equal, bernoulli, gaussian, neyman, diagonal (Gaussian without its kernel)."""
    budgets: tuple[int, ...] = (5, 10, 20, 50, 100, 200)
    """Mean queries per point."""
    perturb: Literal["matrix", "third"] = "matrix"
    """Perturb only the named matrix, or its third of the layers."""
    repeats: int = 20
    """Number of batches, each with its own noise, the same for all allocators."""
    batch: int = 32
    """Batch size."""
    warm: int = 12
    """Training batches of learned allocators."""
    learn: int = 30
    """Training batches of shaped noise."""
    sigma: float = 1e-3
    """Noise scale; the ablation of baselines has its own."""
    seed: int = 0
    """Seed of the new head, all batches and all noise."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    workers: int = 2
    """Processes, with one thread each; 0 runs in this process."""
    quick: bool = False
    """A preview in a minute, in a separate folder: fewer layers, budgets, points and repeats,
    unless set explicitly."""
    output: Path = Path("runs/gradients")
    """Folder of results, tables, figures and start models."""

    def run(self) -> None:
        """Measure, print and write."""
        gradients.main(self.parts, self.study())

    def study(self) -> gradients.GradientStudy:
        """Settings of the study."""
        chosen = vars(self) | (self._quick() if self.quick else {})
        given = {f.name: chosen[f.name] for f in fields(Panel) if f.name in chosen}
        given["budgets"] = tuple(sorted(chosen["budgets"]))
        panel = Panel(**given, weights=weights_digest(self.model))
        names = ("stages", "estimators", "matrices", "layers", "learn", "workers")
        return gradients.GradientStudy(
            chosen["output"], Console(), panel, **{name: chosen[name] for name in names}
        )

    def _quick(self) -> dict[str, Any]:
        """Smaller values of options at their defaults."""
        small: dict[str, Any] = {"layers": ("first", "last"), "budgets": (5, 20), "learn": 6}
        small |= {"repeats": 3, "batch": 8, "warm": 2, "stages": (5, 30)}
        small["output"] = Path("runs/gradients-quick")
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in small.items() if getattr(self, k) == defaults[k]}


@dataclass(frozen=True)
class Study:
    """Check the claims of the paper and of this library."""

    study: tyro.conf.OmitArgPrefixes[
        Annotated[Theorem, tyro.conf.subcommand("theorem")]
        | Annotated[Shaped, tyro.conf.subcommand("shaped")]
        | Annotated[Gradients, tyro.conf.subcommand("gradients")]
        | Annotated[Robustness, tyro.conf.subcommand("robustness")]
    ]
    """The study."""

    def run(self) -> None:
        """Measure and print."""
        self.study.run()


def command(arguments: Sequence[str]) -> tuple[type[Study], None]:
    """The command's type for tyro."""
    return Study, None
