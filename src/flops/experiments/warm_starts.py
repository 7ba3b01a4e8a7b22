"""Where measurements start: a model, some steps of backpropagation into its training.

A trained start is kept in the study's folder, so that the cells of a study, and a study that is
resumed, begin with the same weights and make them once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flops.errors import FlopsError
from flops.optional import MissingPackageError
from flops.perturb.random import generator
from flops.storage.disk import UNWRITABLE, reason
from flops.storage.files import replacing
from flops.tasks.classification.task import loss_fn
from flops.tasks.data.images import ImageData, load
from flops.tasks.data.splits import ImageSplit
from flops.tasks.models.vit import Head, image_format, load_model
from flops.tasks.models.weights import warn_of_other_classes
from flops.training.device import find_device

BATCH = 64  # of the steps of backpropagation
SAMPLES = 0x5A  # sets the batches of measurements apart from other uses of the seed
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class WarmStart:
    """A model, its data, and how far it has been trained.

    Attributes:
        model: As for `flops.tasks.models.vit.load_model`.
        head: "fresh", or "kept" for the model's own.
        data: As for `flops.tasks.data.images.load`.
        limit: Most points of each split; None for all.
        steps: Steps of backpropagation on the training split.
        learning_rate: Of Adam in these.
        device: cpu, cuda, or auto.
        seed: Of the fresh head, all batches and all noise.
        weights: Digest of a model folder, whose contents may change.
    """

    model: str = "bundled"
    head: Head = "fresh"
    data: str = "digits"
    limit: int | None = None
    steps: int = 20
    learning_rate: float = 1e-3
    device: str = "auto"
    seed: int = 0
    weights: str = ""

    @property
    def start(self) -> WarmStart:
        """These fields alone, of settings that have more."""
        return WarmStart(**{f.name: getattr(self, f.name) for f in dataclasses.fields(WarmStart)})

    def path(self, folder: Path) -> Path:
        """Where the weights are kept; named after all that decides them."""
        kept = dataclasses.asdict(self.start)
        name = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
        return folder / "models" / f"{self.steps}-steps-{name}.safetensors"


def finetuned(
    model: Model,
    train: ImageSplit,
    steps: int,
    *,
    learning_rate: float = 1e-3,
    batch: int = BATCH,
    seed: int = 0,
) -> Model:
    """The model after some steps of backpropagation with Adam, from a private generator."""
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    device = next(model.parameters()).device
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pixels, labels = train.batch(torch.randperm(len(train), generator=source)[:batch])
        optimizer.zero_grad()
        loss_fn(model(pixels.to(device)), labels.to(device)).mean().backward()
        optimizer.step()
    model.zero_grad()
    return model


@lru_cache(maxsize=2)  # a process measures many cells of the same start
def load_warm_start(folder: Path, start: WarmStart) -> tuple[nn.Module, ImageData]:
    """The trained model, in evaluation mode, and its data; made if it is not there.

    Raises:
        FlopsError: If model or data do not load.
    """
    data = _data(start.model, start.data, start.limit)
    path = start.path(folder)
    try:
        model, _ = load_model(start.model, len(data.classes), seed=start.seed, head=start.head)
    except MissingPackageError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise FlopsError(str(error)) from error
    if start.head == "kept":
        warn_of_other_classes(model, data.classes)
    model.to(find_device(start.device)).eval()
    if path.is_file():
        try:
            model.load_state_dict(load_file(path))
            return model, data
        except (*UNWRITABLE, RuntimeError) as error:  # RuntimeError: other names or shapes
            warnings.warn(f"{path} is damaged and made again: {reason(error)}", stacklevel=2)
            model, _ = load_model(start.model, len(data.classes), seed=start.seed, head=start.head)
            model.to(find_device(start.device)).eval()
    finetuned(model, data.train, start.steps, learning_rate=start.learning_rate, seed=start.seed)
    if not start.steps:  # as quickly loaded from where it is, and a copy may be large
        return model, data
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch:  # another process may be at it
            save_file(weights, scratch)
    except UNWRITABLE as error:
        warnings.warn(
            f"cannot write {path}: {reason(error)}; the study goes on, and every process makes "
            "this model again",
            stacklevel=2,
        )
    return model, data


def batch_of(data: ImageData, size: int, *key: int) -> Tensor:
    """Rows of a random batch of the training split, a function of the key alone."""
    source = generator(SAMPLES, *key)
    return torch.randperm(len(data.train), generator=source)[:size]


@lru_cache(maxsize=1)
def _data(model: str, data: str, limit: int | None) -> ImageData:
    try:
        return load(data, image_format(model), limit=limit)
    except MissingPackageError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise FlopsError(str(error)) from error
