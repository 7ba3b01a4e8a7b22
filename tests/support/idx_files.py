"""Fashion-MNIST's file format, and a tiny data set in it."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def read_images(path: Path) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes())[16:], np.uint8).reshape(-1, 28, 28)


def tiny_fashion_mnist(folder: Path) -> Path:
    """48 training and 20 test images; image i starts with byte i."""
    folder.mkdir()
    noise = np.random.RandomState(0)
    for images_name, labels_name, n in (
        (TRAIN_IMAGES, TRAIN_LABELS, 48),
        (TEST_IMAGES, TEST_LABELS, 20),
    ):
        images = noise.randint(0, 256, (n, 28, 28))
        images[:, 0, 0] = np.arange(n)
        images[:, 0, 1] = 255
        write_idx(folder / images_name, images)
        write_idx(folder / labels_name, np.arange(n) % 4)
    return folder
