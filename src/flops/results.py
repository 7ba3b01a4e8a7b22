"""What a finished run leaves beside its metrics: the model, and two plots."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from flops.report.allocated import plot_allocation, write_counts
from flops.report.curves import plot_curves
from flops.tasks.optional import require
from flops.tasks.pixels import ImageFormat
from flops.trainer import Trainer


def write_results(trainer: Trainer, folder: Path) -> None:
    """Write the model and the plots; writing them again gives the same.

    Args:
        trainer: The run at its end.
        folder: The run folder.
    """
    _save_model(trainer, folder / "model")
    split, counts = trainer.data.train, folder / "counts.safetensors"

    def pixels(rows: Tensor) -> Tensor:
        return trainer.format.restore(split.batch(rows)[0])

    write_counts(counts, trainer.latest, split.labels, trainer.data.classes, pixels)
    try:
        plot_curves(folder / "metrics.jsonl", folder / "curves.png")
        if trainer.progress.queries:  # backpropagation makes none
            plot_allocation(counts, folder / "allocation.png")
    except ImportError as error:
        warnings.warn(f"no plots were drawn: {error}", stacklevel=3)


def _save_model(trainer: Trainer, folder: Path) -> None:
    """As `transformers` reads it, with the names of the classes and the format of the images."""
    logging: Any = require("transformers.utils.logging")
    model: Any = trainer.model
    names = dict(enumerate(trainer.data.classes))
    model.config.id2label = names
    model.config.label2id = {name: number for number, name in names.items()}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
    text = json.dumps(preprocessor(trainer.format), indent=2)
    (folder / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")


def preprocessor(format: ImageFormat) -> dict[str, Any]:
    """The format of the images in the words of `transformers`."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": format.size, "width": format.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(format.mean),
        "image_std": list(format.std),
    }
