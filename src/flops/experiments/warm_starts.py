"""Start models of measurements: after some steps of backpropagation.

A start model is saved in the study's folder, so that all cells, and a resumed study, use the same
weights, trained once.
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

BATCH = 64  # batch size of backpropagation
SAMPLES = 0x5A  # stream of measured batches, distinct from other uses of the seed
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class WarmStart:
    """A model, its data, and the steps of training.

    Attributes:
        model: As for `flops.tasks.models.vit.load_model`.
        head: "fresh", or "kept" for the model's own.
        data: As for `flops.tasks.data.images.load`.
        limit: Largest number of points per split; None for all.
        steps: Steps of backpropagation on the training split.
        learning_rate: Learning rate of Adam in these steps.
        device: cpu, cuda, or auto.
        seed: Seed of the new head, all batches and all noise.
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
        """The fields of this class, from a subclass with more."""
        return WarmStart(**{f.name: getattr(self, f.name) for f in dataclasses.fields(WarmStart)})

    def path(self, folder: Path) -> Path:
        """File of the weights, named by everything that determines them."""
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
    """The model after some steps of backpropagation with Adam; uses a private generator."""
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


@lru_cache(maxsize=2)  # a process measures many cells with the same start
def load_warm_start(folder: Path, start: WarmStart) -> tuple[nn.Module, ImageData]:
    """The trained model, in evaluation mode, and its data; trained if not saved yet.

    Raises:
        FlopsError: If model or data cannot be loaded.
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
            warnings.warn(f"{path} is damaged and trained again: {reason(error)}", stacklevel=2)
            model, _ = load_model(start.model, len(data.classes), seed=start.seed, head=start.head)
            model.to(find_device(start.device)).eval()
    finetuned(model, data.train, start.steps, learning_rate=start.learning_rate, seed=start.seed)
    if not start.steps:  # loading the original is as fast, and a copy may be large
        return model, data
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch:  # another process may write it too
            save_file(weights, scratch)
    except UNWRITABLE as error:
        warnings.warn(
            f"cannot write {path}: {reason(error)}; the study continues, and every process "
            "trains this model again",
            stacklevel=2,
        )
    return model, data


def batch_of(data: ImageData, size: int, *key: int) -> Tensor:
    """Rows of a random batch of the training split, a function of the key."""
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
