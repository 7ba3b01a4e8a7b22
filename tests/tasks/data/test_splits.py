"""Rows of a split: held out by class, limited, batched, in memory or read when asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from flops.tasks.classification import accuracy
from flops.tasks.data import images
from flops.tasks.data.images import load
from flops.tasks.data.splits import LazySplit, StoredSplit, hold_out
from tests.support.pictures import GREY, make_folder, shades


@pytest.mark.parametrize("memory", [images.MEMORY, 0])
def test_flat_folder_is_split_by_class_without_overlap(tmp_path, memory):
    make_folder(tmp_path, {"a": 60, "b": 30, "test": 10})  # a class may be called test
    data = load(str(tmp_path), GREY, memory=memory)
    parts = [data.train, data.validation, data.test]
    assert isinstance(data.train, StoredSplit if memory else LazySplit)
    assert [Counter(part.labels.tolist()) for part in parts] == [
        {0: 42, 1: 21, 2: 7},
        {0: 6, 1: 3, 2: 1},
        {0: 12, 1: 6, 2: 2},
    ]
    seen = [shade for part in parts for shade in shades(part)]
    assert sorted(seen) == list(range(100))
    for part in parts:  # labels belong to their images
        classes = [0 if s < 60 else 1 if s < 90 else 2 for s in shades(part)]
        assert part.labels.tolist() == classes
    assert len(data.notes) == 2
    assert "validation: 10 points held out of the 100" in data.notes[0]
    assert "test: 20 points" in data.notes[1]


def test_batches_by_row_are_the_split_itself(tmp_path):
    make_folder(tmp_path, {"a": 10, "b": 10})
    for memory in (images.MEMORY, 0):
        split = load(str(tmp_path), GREY, memory=memory).train
        whole, _ = split.batch(torch.arange(len(split)))
        rows = torch.tensor([3, 0, 3, 7])
        pixels, labels = split.batch(rows)
        assert torch.equal(pixels, whole[rows])
        assert torch.equal(labels, split.labels[rows])
        pixels.zero_()  # the caller's own copy
        assert torch.equal(split.batch(rows)[0], whole[rows])
        with pytest.raises(IndexError):
            split.batch(torch.tensor([len(split)]))


def test_limit_is_stratified_and_fixed(tmp_path):
    make_folder(tmp_path / "train", {"a": 40, "b": 20})
    make_folder(tmp_path / "test", {"a": 3, "b": 3}, start=100)
    data = load(str(tmp_path), GREY, limit=9)
    assert Counter(data.train.labels.tolist()) == {0: 6, 1: 3}
    assert (len(data.validation), len(data.test)) == (6, 6)
    assert shades(data.train) == shades(load(str(tmp_path), GREY, limit=9, memory=0).train)
    assert set(shades(data.train)) <= set(shades(load(str(tmp_path), GREY).train))


def test_accuracy_reads_any_split(tmp_path):
    make_folder(tmp_path, {"a": 10, "b": 10})

    class Shade(torch.nn.Module):
        def forward(self, pixels):
            dark = pixels.mean((1, 2, 3)) * 255 < 9.5
            return torch.stack([dark.float(), 1 - dark.float()], 1)

    for memory in (0, images.MEMORY):
        assert accuracy(Shade(), load(str(tmp_path), GREY, memory=memory).train, 3) == 1


def test_held_out_rows_are_stratified_and_complete():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    rest, held = hold_out(labels, 10)
    assert sorted([*rest, *held]) == list(range(100))
    assert np.bincount(labels[held]).tolist() == [5, 3, 2]
