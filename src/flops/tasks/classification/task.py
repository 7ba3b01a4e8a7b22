"""The task of `flops finetune`: loss, accuracy, gradient clipping of attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.engine.forward_gradient import ForwardGradient
from flops.errors import FlopsError
from flops.optional import MissingPackageError, require
from flops.passes.ranks import Ranks
from flops.storage.disk import filling
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.classification.metrics import logits
from flops.tasks.data.images import ImageData, ImageFormat, load
from flops.tasks.data.splits import ImageSplit
from flops.tasks.models.vit import image_format, load_model
from flops.tasks.models.weights import warn_of_other_classes
from flops.training.methods import engine
from flops.training.progress import Evaluation
from flops.training.task import open_task


class Classification:
    """The task of `flops finetune`; see `flops.training.task.Task`.

    Args:
        config: Model, data and method.
        device: Where the model runs.

    Raises:
        FlopsError: If model or data are missing or do not fit together.
    """

    def __init__(self, config: FinetuneConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.model, self.format, self.data = _load(config)
        self.model.to(device).eval()

    @property
    def title(self) -> str:
        """One line about model and data."""
        data, parameters = self.data, self.model.parameters()
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        return (
            f"{self.config.model} ({trainable:,} parameters) on {data.name} "
            f"({len(data.train):,} images, {len(data.classes)} classes)"
        )

    @property
    def guesses_class(self) -> bool:
        """Whether the accuracy of guessing is one over the number of classes."""
        return True

    def engine(self) -> ForwardGradient:
        """The engine of the configured method."""
        config = self.config
        return engine(self.model, loss_fn, config.recipe(), seed=config.seed, chunk=config.chunk)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and classes of some training points."""
        pixels, labels = self.data.train.batch(rows)
        return pixels.to(self.device), labels.to(self.device)

    def limit_gradients(self) -> None:
        """Clip the gradients of attention, if configured."""
        if self.config.clip_attention is not None:
            clip_attention(self.model, self.config.clip_attention)

    def measure(self, split: ImageSplit, ranks: Ranks) -> tuple[float, float]:
        """Accuracy and mean loss on a split."""
        return measure(self.model, split, self.config.batch, self.device, ranks)

    def contents(self) -> Iterator[bytes]:
        """The classes, and the labels of all splits."""
        data = self.data
        yield "\n".join(data.classes).encode()
        for split in (data.train, data.validation, data.test):
            yield split.labels.long().cpu().numpy().tobytes()

    def pixels(self, rows: Tensor) -> Tensor:
        """Images of some training points, for display."""
        return self.format.restore(self.data.train.batch(rows)[0])

    def excerpts(self, rows: Tensor) -> None:
        """Images are shown instead."""

    def save(self, folder: Path, evaluations: list[Evaluation]) -> None:
        """Write model/ in the format of `transformers`, with class names and preprocessing."""
        logging: Any = require("transformers.utils.logging")
        model: Any = self.model
        names = dict(enumerate(self.data.classes))
        model.config.id2label = names
        model.config.label2id = {name: number for number, name in names.items()}
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with filling(folder / "model", last="preprocessor_config.json") as scratch:
                model.save_pretrained(scratch)
                text = json.dumps(preprocessor(self.format), indent=2)
                (scratch / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")
        finally:
            if bars:
                logging.enable_progress_bar()


open_task.register(FinetuneConfig)(Classification)


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of each point."""
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def measure(
    model: nn.Module,
    split: ImageSplit,
    batch: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> tuple[float, float]:
    """Accuracy and mean loss on a split; ranks take the batches in turn.

    Raises:
        FlopsError: If it has no points.
    """
    if not len(split):
        raise FlopsError("cannot evaluate on an empty split")
    right, total, ranks = 0, 0.0, ranks or Ranks()
    with torch.inference_mode():
        for rows in torch.arange(len(split)).split(max(64, batch))[ranks.rank :: ranks.size]:
            pixels, labels = split.batch(rows)
            outputs, labels = model(pixels.to(device)), labels.to(device)
            right += int((logits(outputs).argmax(-1) == labels).sum())
            total += float(loss_fn(outputs, labels).double().sum())
    all_right, all_loss = ranks.sum_scalars([right, total])
    return all_right / len(split), all_loss / len(split)


def clip_attention(model: nn.Module, most: float) -> None:
    """Scale the gradient of all attention parameters down to a norm of at most ``most``."""
    names = ("attention", "attn")
    parameters = [p for n, p in model.named_parameters() if any(part in n for part in names)]
    torch.nn.utils.clip_grad_norm_(parameters, most)


def load_data(config: FinetuneConfig, format: ImageFormat) -> ImageData:
    """The data of a configuration, in a model's format; raises as `tasks.data.images.load`."""
    return load(
        config.data,
        format,
        image_column=config.image_column,
        label_column=config.label_column,
        split_column=config.split_column,
        splits=config.named_splits(),
        config=config.data_config,
        strict=config.strict,
        limit=config.limit,
    )


def _load(config: FinetuneConfig) -> tuple[nn.Module, ImageFormat, ImageData]:
    try:
        # The data need the model's image format, and its head needs the number of classes.
        data = load_data(config, image_format(config.model))
        if len(data.classes) < 2:
            raise ValueError(
                f"'{config.data}' has a single class, '{data.classes[0]}': nothing can be "
                "learned from it"
            )
        model, format = load_model(
            config.model, len(data.classes), seed=config.seed, head=config.head
        )
        if config.head == "kept":
            warn_of_other_classes(model, data.classes)
    except MissingPackageError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise FlopsError(str(error)) from error
    return model, format, data


def preprocessor(format: ImageFormat) -> dict[str, Any]:
    """The image format as a `transformers` preprocessor configuration."""
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
