"""Image classification: a tiny pretrained vision transformer and data to fine-tune it on.

The transformer ships with the package (`scripts/pretrain_vit.py` made it from Fashion-MNIST), and
scikit-learn's handwritten digits are the data it is adapted to, so the task needs no download.
"""

from __future__ import annotations

import gzip
import importlib.resources
import math
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.optional import require
from flops.tasks.data.splits import ImageSplit, hold_out

if TYPE_CHECKING:
    from transformers import ViTForImageClassification

IMAGE_SIZE = 32
# Pixels in [0, 1] become (pixel - mean) / std. The pretraining script writes the same two numbers
# into the model's preprocessor_config.json, so other tools feed the model what it was trained on.
IMAGE_MEAN, IMAGE_STD = 0.5, 0.5

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_IDX_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


@dataclass(frozen=True)
class Split:
    """Images, normalised for the model, and their classes."""

    images: Tensor  # (N, 1, size, size), float32
    labels: Tensor  # (N,), int64

    def __len__(self) -> int:
        """Number of points."""
        return len(self.labels)

    def take(self, rows: Tensor | slice) -> Split:
        """Return some of the points, as a split of their own."""
        return Split(self.images[rows], self.labels[rows])

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of these rows."""
        return self.images[rows], self.labels[rows]


@dataclass(frozen=True)
class Splits:
    """Train to fit, validation to choose hyper-parameters, test to measure once."""

    train: Split
    validation: Split
    test: Split


def bundled_vit(
    classes: int = 10, *, seed: int = 0, pretrained_head: bool = False
) -> ViTForImageClassification:
    """Load the bundled vision transformer, in evaluation mode, with a fresh classification head.

    Six layers of 64 channels, 17 tokens (a class token and 16 patches of 8x8 pixels), 306,000
    parameters in float32, pretrained on Fashion-MNIST. The global random state is left untouched.

    Args:
        classes: Number of outputs of the head.
        seed: Draws the fresh head: weights from N(0, 0.02^2), biases zero.
        pretrained_head: Keep the Fashion-MNIST head instead; `classes` must then be 10.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `classes` is not positive, or does not fit the pretrained head.
    """
    if classes < 1 or (pretrained_head and classes != 10):
        raise ValueError(f"classes must be >= 1, and 10 to keep the pretrained head, got {classes}")
    transformers = require("transformers")
    asset = importlib.resources.files("flops.tasks") / "assets" / "tiny-vit"
    logging = transformers.utils.logging
    # devices=[]: all of it runs on the CPU, and saving CUDA's random state would start CUDA
    with ExitStack() as stack, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        folder = stack.enter_context(importlib.resources.as_file(asset))
        if logging.is_progress_bar_enabled():  # one megabyte needs none
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        model: ViTForImageClassification = transformers.ViTForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )  # in evaluation mode
        if not pretrained_head:
            generator = torch.Generator().manual_seed(seed)
            head = nn.Linear(model.config.hidden_size, classes, dtype=torch.float32)
            nn.init.normal_(head.weight, std=0.02, generator=generator)
            nn.init.zeros_(head.bias)
            model.classifier, model.num_labels = head.eval(), classes
            model.config.id2label = {i: f"LABEL_{i}" for i in range(classes)}  # no garments' names
            model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    return model


def digits(*, size: int = IMAGE_SIZE) -> Splits:
    """Return scikit-learn's handwritten digits, resized and normalised for the bundled model.

    The 1,797 images of 8x8 are upsampled bilinearly. The splits have 1,197 / 300 / 300 points, are
    stratified (each class within one point of its share) and never change.

    Args:
        size: Side of the returned images.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: `size` is less than 8.
    """
    if size < 8:
        raise ValueError(f"size must be at least 8, the side of the original images, got {size}")
    data = require("sklearn.datasets").load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16  # (N, 1, 8, 8), in [0, 1]
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    rest, test = _hold_out(Split(_normalise(images), torch.from_numpy(data.target).long()), 300)
    return Splits(*_hold_out(rest, 300), test)


def fashion_mnist(folder: Path | None = None) -> Splits:
    """Read Fashion-MNIST, padded from 28x28 to 32x32 and normalised for the bundled model.

    One twelfth of the training images (5,000 of 60,000, stratified) is held out for validation.

    Args:
        folder: Holds the four idx .gz files; None is that of Debian's `dataset-fashion-mnist`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is not what its name says.
    """
    folder = FASHION_MNIST_FOLDER if folder is None else Path(folder)
    paths = [folder / f"{name}-ubyte.gz" for name in _IDX_FILES]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"no Fashion-MNIST in {folder}: missing {', '.join(missing)}. Install the Debian "
            "package dataset-fashion-mnist, or give a folder that holds its four idx .gz files"
        )
    full, test = _read_images(*paths[:2]), _read_images(*paths[2:])
    return Splits(*_hold_out(full, len(full) // 12), test)


def logits(outputs: object) -> Tensor:
    """Return the logits of whatever a classifier returned.

    Args:
        outputs: A tensor; a transformers `ModelOutput` or another object with `logits`; or a tuple,
            of which the first tensor with a class axis counts (a loss may come before it).

    Raises:
        TypeError: There are no logits in it.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple):
        found = next((o for o in outputs if isinstance(o, Tensor) and o.dim() > 1), None)
    else:
        found = getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    allowed = "a tensor, a tuple that holds one, or an output with a tensor `logits`"
    raise TypeError(f"no logits in a {type(outputs).__name__}: the model must return {allowed}")


def accuracy(model: nn.Module, split: ImageSplit, batch: int = 256) -> float:
    """Return the share of points, in [0, 1], whose largest logit is at their label.

    Runs on the model's device, in evaluation mode; each module gets its training flag back.

    Raises:
        ValueError: The split is empty or `batch` is not positive.
    """
    if len(split) == 0 or batch < 1:
        raise ValueError(f"need at least one point and batch >= 1, got {len(split)} and {batch=}")
    device = next((p.device for p in model.parameters()), split.labels.device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    correct = 0
    try:
        with torch.inference_mode():
            for start in range(0, len(split), batch):
                rows = torch.arange(start, min(start + batch, len(split)))
                images, labels = split.batch(rows)
                predicted = logits(model(images.to(device))).argmax(-1)
                correct += int((predicted == labels.to(device)).sum())
    finally:
        for module in training:
            module.training = True  # not .train(), which would also reach submodules in eval mode
    return correct / len(split)


def _normalise(pixels: Tensor) -> Tensor:
    """Map pixels in [0, 1] to what the model expects, in place."""
    return pixels.sub_(IMAGE_MEAN).div_(IMAGE_STD)


def _hold_out(split: Split, size: int) -> tuple[Split, Split]:
    """Return (the rest, `size` points held out), stratified, both in a fixed random order."""
    rest, held = hold_out(split.labels.numpy(), size)
    return split.take(torch.from_numpy(rest)), split.take(torch.from_numpy(held))


def _read_images(images_file: Path, labels_file: Path) -> Split:
    images, labels = _read_idx(images_file), _read_idx(labels_file)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        found = f"found shapes {list(images.shape)} and {list(labels.shape)}"
        raise ValueError(f"need N images of 28x28 in {images_file} and N labels beside it, {found}")
    pixels = F.pad(images.unsqueeze(1), (2, 2, 2, 2)).float().div_(255)  # (N, 1, 32, 32)
    return Split(_normalise(pixels), labels.long())


def _read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of bytes: 0, 0, type 8, rank, big-endian sizes, then the values."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    rank = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    *sizes, start = range(4, 5 + 4 * rank, 4)
    shape = [int.from_bytes(content[i : i + 4], "big") for i in sizes]
    if not shape or len(content) - start != math.prod(shape):
        found = f"{len(content)} bytes, first {content[:16].hex(' ', 4)}"
        raise ValueError(f"{path} is not an idx file of bytes, or not a whole one: {found}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).copy()).view(shape)
