"""`flops study`: each claim of the paper, and of this library, as a measurement."""

from __future__ import annotations

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
    """Check Theorems 1 and 2 on a model whose traces are known in closed form."""

    repeats: int = 1000
    """Estimates per allocation."""
    seed: int = 0
    """Seed of the problem and of the noise."""

    def run(self) -> None:
        """Measure and print."""
        theorem.main(self.repeats, self.seed)


@dataclass(frozen=True)
class Shaped:
    """Measure shaped noise: cosines while training, accuracy, other problems, ingredients.

    Every run is kept as soon as it is done; the same command continues where it was stopped.

    For example:

    $ flops study shaped
    $ flops study shaped --parts main problems --seeds 2
    $ flops study shaped --parts main --seeds 1 --most 20 --output runs/look
    """

    parts: tuple[Literal["main", "problems", "accuracy", "grid"], ...] = (
        "main",
        "problems",
        "accuracy",
        "grid",
    )
    """What to measure."""
    seeds: int = 5
    """Seeds of main, problems and accuracy."""
    grid_seeds: int = 1
    """Seeds of grid."""
    workers: int = 2
    """Processes, of one thread each; 0 runs in this one."""
    most: int | None = None
    """Most training steps of a run, for a quick look; None for all."""
    output: Path = Path("runs/shaped")
    """Folder of results, tables and plots."""

    def run(self) -> None:
        """Measure, print and write."""
        study = shaped.ShapedStudy(
            self.output, self.seeds, self.grid_seeds, self.workers, Console(), self.most
        )
        shaped.main(self.parts, study)


@dataclass(frozen=True)
class Gradients:
    """Measure the cosine to the exact gradient by budget, allocator, estimator, matrix and layer.

    The ablations of the paper, on any vision transformer. Every panel is kept as soon as it is
    done; the same command continues where it was stopped.

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
    """What to measure: the paper's panels, and ablations on thirds of the layers."""
    model: str = "bundled"
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = "fresh"
    """A fresh classification head, or the model's own kept, if it knows the classes of the data."""
    data: str = "digits"
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    limit: int | None = None
    """Most points of each split; None for all."""
    stages: tuple[int, ...] = (20, 150)
    """Steps of backpropagation before measuring: a stage of training each."""
    learning_rate: float = 1e-3
    """Of Adam in these."""
    estimators: tuple[str, ...] = ("lr", "spsa")
    """lr, spsa, es."""
    matrices: tuple[str, ...] = ("key", "ff")
    """query, key, value, output, ff, ff2, or the name of a linear module in a layer."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """first, middle, last, or numbers from 1 on."""
    allocators: tuple[str, ...] = ("equal", "bernoulli", "gaussian", "neyman")
    """equal, bernoulli, gaussian, neyman, diagonal (Gaussian without its kernel)."""
    budgets: tuple[int, ...] = (5, 10, 20, 50, 100, 200)
    """Mean queries per point."""
    perturb: Literal["matrix", "third"] = "matrix"
    """Perturb the named matrix alone, or the third of the layers that it lies in."""
    repeats: int = 20
    """Batches, each with noise of its own, the same for all allocators."""
    batch: int = 32
    """Points of a batch."""
    warm: int = 12
    """Batches that learned allocators have seen before."""
    learn: int = 30
    """Batches that shaped noise has seen before."""
    sigma: float = 1e-3
    """Noise scale; the ablation of baselines has its own."""
    seed: int = 0
    """Of the fresh head, all batches and all noise."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""
    workers: int = 2
    """Processes, of one thread each; 0 runs in this one."""
    quick: bool = False
    """A look in a minute, in a folder of its own: fewer layers, budgets, points and repeats, where
    these are at their defaults."""
    output: Path = Path("runs/gradients")
    """Folder of results, tables, figures and start models."""

    def run(self) -> None:
        """Measure, print and write."""
        chosen = vars(self) | (self._quick() if self.quick else {})
        given = {f.name: chosen[f.name] for f in fields(Panel) if f.name in chosen}
        given["budgets"] = tuple(sorted(chosen["budgets"]))
        panel = Panel(**given, weights=weights_digest(self.model))
        names = ("stages", "estimators", "matrices", "layers", "learn", "workers")
        study = gradients.GradientStudy(
            chosen["output"], Console(), panel, **{name: chosen[name] for name in names}
        )
        gradients.main(self.parts, study)

    def _quick(self) -> dict[str, Any]:
        """Smaller values of what was left at its default."""
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
    """Which study."""

    def run(self) -> None:
        """Measure and print."""
        self.study.run()
