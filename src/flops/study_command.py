"""`flops study`: each claim of the paper, and of this library, as a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from flops.robustness_command import Robustness


@dataclass(frozen=True)
class Theorem:
    """Check Theorems 1 and 2 on a model whose traces are known in closed form."""

    repeats: int = 1000
    """Estimates per allocation."""
    seed: int = 0
    """Seed of the problem and of the noise."""

    def run(self) -> None:
        """Measure and print."""
        from flops.studies import theorem

        theorem.main(self.repeats, self.seed)


@dataclass(frozen=True)
class Shaped:
    """Measure shaped noise: cosines while training, accuracy, other problems, ingredients.

    Every run is kept as soon as it is done; the same command continues where it was stopped.

    Examples:
        flops study shaped
        flops study shaped --parts main problems --seeds 2
        flops study shaped --parts main --seeds 1 --most 20 --output runs/look
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
        from flops.studies import shaped

        plan = shaped.Plan(
            self.output, self.seeds, self.grid_seeds, self.workers, Console(), self.most
        )
        shaped.main(self.parts, plan)


@dataclass(frozen=True)
class Study:
    """Check the claims of the paper and of this library."""

    study: tyro.conf.OmitArgPrefixes[
        Annotated[Theorem, tyro.conf.subcommand("theorem")]
        | Annotated[Shaped, tyro.conf.subcommand("shaped")]
        | Annotated[Robustness, tyro.conf.subcommand("robustness")]
    ]
    """Which study."""

    def run(self) -> None:
        """Measure and print."""
        self.study.run()
