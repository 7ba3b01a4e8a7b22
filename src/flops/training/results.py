"""What a finished run leaves beside its metrics: what was trained, and two plots."""

from __future__ import annotations

import warnings
from pathlib import Path

from flops.report.allocation import plot_allocation, write_counts
from flops.report.curves import plot_curves
from flops.training.trainer import Trainer


def write_results(trainer: Trainer, folder: Path) -> None:
    """Write the model and the plots; writing them again gives the same.

    Args:
        trainer: The run at its end.
        folder: The run folder.
    """
    task, data, counts = trainer.task, trainer.data, folder / "counts.safetensors"
    task.save(folder, trainer.progress.evaluations)
    write_counts(counts, trainer.latest, data.train.labels, data.classes, task.pixels)
    try:
        plot_curves(folder / "metrics.jsonl", folder / "curves.png")
        if trainer.progress.queries:  # backpropagation makes none
            plot_allocation(counts, folder / "allocation.png")
    except ImportError as error:
        warnings.warn(f"no plots were drawn: {error}", stacklevel=3)
