"""Fashion-MNIST from its idx files, normalised for the bundled vision transformer."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flops.tasks.data.digits import Split, Splits, hold_out_split, normalise

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_IDX_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def fashion_mnist(folder: Path | None = None) -> Splits:
    """Read Fashion-MNIST, padded from 28x28 to 32x32 and normalised for the bundled model.

    One twelfth of the training images (5,000 of 60,000, stratified) is held out for validation.

    Args:
        folder: Folder of the four idx .gz files; None for that of Debian's `dataset-fashion-mnist`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file has another format or is incomplete.
    """
    folder = FASHION_MNIST_FOLDER if folder is None else Path(folder)
    paths = [folder / f"{name}-ubyte.gz" for name in _IDX_FILES]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"no Fashion-MNIST in {folder}: missing {', '.join(missing)}. Install the Debian "
            "package dataset-fashion-mnist, or give a folder that holds its four idx .gz files"
        )
    full, test = _read_images(*paths[:2]), _read_images(*paths[2:])
    return Splits(*hold_out_split(full, len(full) // 12), test)


def _read_images(images_file: Path, labels_file: Path) -> Split:
    images, labels = _read_idx(images_file), _read_idx(labels_file)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        found = f"found shapes {list(images.shape)} and {list(labels.shape)}"
        raise ValueError(f"need N images of 28x28 in {images_file} and N labels beside it, {found}")
    pixels = F.pad(images.unsqueeze(1), (2, 2, 2, 2)).float().div_(255)  # (N, 1, 32, 32)
    return Split(normalise(pixels), labels.long())


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
        raise ValueError(f"{path} is not a complete idx file of bytes: {found}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).copy()).view(shape)
