"""Fashion-MNIST from its four files, and files that are missing or damaged."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from flops.tasks.data.fashion_mnist import fashion_mnist
from tests.support.idx_files import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    tiny_fashion_mnist,
    write_idx,
)
from tests.support.splits import parts


@pytest.fixture
def tiny_folder(tmp_path):
    return tiny_fashion_mnist(tmp_path / "tiny-fashion-mnist")


def test_fashion_mnist_is_read_padded_and_normalised(tiny_folder):
    data = fashion_mnist(tiny_folder)
    assert [len(split) for split in parts(data)] == [44, 4, 20]
    for split in parts(data):
        assert split.images.shape == (len(split), 1, 32, 32)
        border = torch.ones(32, 32, dtype=torch.bool)
        border[2:-2, 2:-2] = False
        assert (split.images[:, 0, border] == -1).all()
        assert (split.images[:, 0, 2, 3] == 1).all()  # the byte 255
        index = ((split.images[:, 0, 2, 2] * 0.5 + 0.5) * 255).round().long()
        assert torch.equal(split.labels, index % 4)
    assert data.validation.labels.sort().values.tolist() == [0, 1, 2, 3]
    assert data.test.labels.tolist() == [0, 1, 2, 3] * 5  # the test set keeps its order


def test_fashion_mnist_takes_a_folder_as_text(tiny_folder):
    assert len(fashion_mnist(str(tiny_folder)).test) == 20


def test_missing_files_are_named_with_the_remedy(tiny_folder):
    (tiny_folder / TEST_LABELS).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        fashion_mnist(tiny_folder)
    message = str(caught.value)
    assert str(tiny_folder) in message
    assert TEST_LABELS in message
    assert TRAIN_IMAGES not in message
    assert "Debian package dataset-fashion-mnist" in message
    assert "four idx .gz files" in message


def gzipped(*values):
    return gzip.compress(bytes(values), mtime=0)  # the time would make the test's name change


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"plain text", "not a complete gzip file"),
        (gzipped(*[7] * 1000)[:-9], "not a complete gzip file"),
        (gzipped(*range(200))[:10] + b"\xff" * 50, "not a complete gzip file"),
        (gzipped(), "not a complete idx file"),
        (gzipped(0, 0, 8), "not a complete idx file"),
        (gzipped(0, 0, 8, 0), "not a complete idx file"),
        (gzipped(0, 0, 13, 1, 0, 0, 0, 1, 5), "not a complete idx file"),  # type 13: floats
        (gzipped(0, 0, 8, 3, 0, 0), "not a complete idx file"),  # ends inside the sizes
        (gzipped(0, 0, 8, 1, 0, 0, 0, 3, 1, 2), "not a complete idx file"),
        (gzipped(0, 0, 8, 1, 0, 0, 0, 1, 1, 2), "not a complete idx file"),
    ],
    ids=range(10),
)
def test_a_damaged_file_is_named(tiny_folder, content, problem):
    path = tiny_folder / TRAIN_LABELS
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        fashion_mnist(tiny_folder)
    assert str(path) in str(caught.value)


def test_files_that_do_not_belong_together_are_refused(tiny_folder):
    write_idx(tiny_folder / TEST_LABELS, np.zeros(19))
    with pytest.raises(ValueError, match=r"\[20, 28, 28\] and \[19\]"):
        fashion_mnist(tiny_folder)
    write_idx(tiny_folder / TEST_IMAGES, np.zeros((19, 32, 32)))
    with pytest.raises(ValueError, match=r"N images of 28x28.*\[19, 32, 32\]"):
        fashion_mnist(tiny_folder)
