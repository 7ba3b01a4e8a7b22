"""The digits: sizes, splits that never change, held-out points."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flops.tasks.classification import digits
from flops.tasks.data.digits import Split, hold_out_split
from tests.support.splits import parts

pytest.importorskip("sklearn")


def test_digits_have_the_stated_sizes():
    data = digits()
    assert [len(split) for split in parts(data)] == [1197, 300, 300]
    for split in parts(data):
        assert split.images.shape == (len(split), 1, 32, 32)
        assert split.images.dtype == torch.float32
        assert split.labels.shape == (len(split),)
        assert split.labels.dtype == torch.int64
    pixels = torch.cat([split.images for split in parts(data)])
    assert (pixels.min(), pixels.max()) == (-1, 1)  # [0, 1] under mean and std 0.5


def test_digit_splits_are_disjoint_and_cover_the_data():
    # the 1,797 images are all different, so different images are different points
    images = torch.cat([split.images for split in parts(digits(size=8))]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 1797


def test_digits_keep_each_image_with_its_label():
    from sklearn.datasets import load_digits

    data = load_digits()
    label_of = {
        image.tobytes(): label for image, label in zip(data.images, data.target, strict=True)
    }
    for split in parts(digits(size=8)):
        originals = ((split.images * 0.5 + 0.5) * 16).round().double().squeeze(1).numpy()
        assert [label_of[image.tobytes()] for image in originals] == split.labels.tolist()


def test_digit_splits_are_stratified():
    data = digits()
    counts = torch.stack([torch.bincount(split.labels, minlength=10) for split in parts(data)])
    for row, size in zip(counts, (1197, 300, 300), strict=True):
        assert row.sum() == size
        assert (row - counts.sum(0) * size / 1797).abs().max() < 2


def test_digit_splits_are_shuffled():
    for split in parts(digits()):
        labels = split.labels
        assert (labels[1:] == labels[:-1]).float().mean() < 0.25  # 0.1 if independent; sorted: ~1


def test_digits_never_change():
    torch.manual_seed(3)
    np.random.seed(3)
    data = digits()
    again = digits()
    for split, other in zip(parts(data), parts(again), strict=True):
        assert torch.equal(split.images, other.images)
        assert torch.equal(split.labels, other.labels)
    # written down: published accuracies refer to these splits
    assert data.train.labels[:10].tolist() == [1, 0, 3, 1, 6, 7, 7, 1, 2, 3]
    assert data.validation.labels[:10].tolist() == [9, 2, 7, 8, 1, 6, 3, 0, 4, 1]
    assert data.test.labels[:10].tolist() == [5, 2, 6, 8, 7, 4, 9, 1, 0, 6]


@pytest.mark.parametrize("size", [8, 16, 28])
def test_digits_come_in_other_sizes(size):
    assert digits(size=size).test.images.shape == (300, 1, size, size)


@pytest.mark.parametrize("size", [7, 0, -1])
def test_digits_are_not_shrunk(size):
    with pytest.raises(ValueError, match=f"at least 8.*got {size}"):
        digits(size=size)


def test_splits_are_frozen():
    data = digits(size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train = data.test
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train.labels = data.test.labels


@pytest.mark.parametrize(("n", "size"), [(1, 0), (7, 0), (7, 7), (12, 1), (101, 50), (60, 59)])
def test_holding_out_is_exact_disjoint_and_stratified(n, size):
    labels = torch.arange(n) % 3
    rest, held = hold_out_split(Split(torch.arange(n), labels), size)
    assert len(held) == size
    assert sorted([*rest.images.tolist(), *held.images.tolist()]) == list(range(n))
    for split in (rest, held):
        assert torch.equal(split.labels, split.images % 3)
        share = torch.bincount(labels, minlength=3) * len(split) / n
        assert (torch.bincount(split.labels, minlength=3) - share).abs().max() <= 1
