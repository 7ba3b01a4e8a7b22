"""`flops evaluate`: accuracy of a run's model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from flops.experiments.evaluation import SplitName, evaluate_run
from flops.training.console import Lines


@dataclass(frozen=True)
class Evaluate:
    """Test the model of a run: accuracy with its 95 % interval, and loss.

    Works for runs of finetune (images and texts) and align, also before they are finished: the
    last checkpoint is evaluated, and nothing in the folder is changed.

    For example:

    $ flops evaluate runs/digits-shaped-lr-seed0
    $ flops evaluate runs/photos --data path/to/other/photos
    $ flops evaluate runs/photos --split validation test --json
    """

    folder: tyro.conf.Positional[Path]
    """The run directory."""
    data: str | None = None
    """Other data with the same classes, as of finetune; None for the run's own."""
    split: tuple[SplitName, ...] | None = None
    """Splits to evaluate; None for test, and for all points of other data."""
    limit: int | None = None
    """Largest number of points per split, for a quick look; None for that of the run."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    json: bool = False
    """Print JSON instead of a sentence."""

    def run(self) -> None:
        """Evaluate and print."""
        with Lines(Console(stderr=True)).warnings():
            found = evaluate_run(
                self.folder, self.data, splits=self.split, limit=self.limit, device=self.device
            )
        sys.stdout.write((json.dumps(found.to_dict()) if self.json else str(found)) + "\n")


def command(arguments: Sequence[str]) -> tuple[type[Evaluate], None]:
    """The command's type for tyro."""
    return Evaluate, None
