"""Images by name or path: embedded data, names that are none, options that do not fit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from flops.tasks.classification import digits
from flops.tasks.data.images import ImageFormat, load
from tests.support.idx_files import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, write_idx
from tests.support.pictures import GREY, RGB, make_folder
from tests.support.splits import SPLITS


def test_a_mistyped_path_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no data 'photos/trian'"):
        load("photos/trian", GREY)


def test_digits_are_those_of_the_vision_task():
    data, splits = load("digits"), digits()
    for name in SPLITS:
        found, expected = getattr(data, name), getattr(splits, name)
        pixels, labels = found.batch(torch.arange(len(found)))
        assert torch.equal(pixels, expected.images)
        assert torch.equal(labels, expected.labels)
    assert data.classes == tuple("0123456789")
    assert Counter(load("digits", limit=50).train.labels.tolist()) == dict.fromkeys(range(10), 5)


def test_digits_for_another_model():
    format = ImageFormat(56, 3, (0.5, 0.4, 0.3), (0.5, 0.25, 0.2))
    data, rows = load("digits", format, limit=20), torch.arange(20)
    plain = load("digits", ImageFormat(56, 1, (0.0,), (1.0,)), limit=20).test.batch(rows)[0]
    pixels, _ = data.test.batch(rows)
    assert pixels.shape == (20, 3, 56, 56)
    for c in range(3):
        expected = (plain[:, 0] - format.mean[c]) / format.std[c]
        torch.testing.assert_close(pixels[:, c], expected)
    large = digits(size=56).test
    same = (large.images[:, 0] * 0.5 + 0.5).unsqueeze(1)
    found = load("digits", ImageFormat(56, 1, (0.0,), (1.0,))).test.batch(torch.arange(300))[0]
    torch.testing.assert_close(found, same)


def test_fashion_mnist_from_a_folder(tmp_path):
    for names, n in (((TRAIN_IMAGES, TRAIN_LABELS), 48), ((TEST_IMAGES, TEST_LABELS), 20)):
        write_idx(tmp_path / names[0], np.full((n, 28, 28), 100))
        write_idx(tmp_path / names[1], np.arange(n) % 10)
    data = load(f"fashion-mnist:{tmp_path}")
    assert [len(getattr(data, name)) for name in SPLITS] == [44, 4, 20]
    assert data.classes[9] == "Ankle boot"
    small = load(f"fashion-mnist:{tmp_path}", RGB).test.batch(torch.tensor([0]))[0]
    assert small.shape == (1, 3, 8, 8)
    assert RGB.restore(small)[0, :, 4, 4].mul(255).tolist() == pytest.approx([100] * 3, abs=0.01)
    with pytest.raises(FileNotFoundError, match="no Fashion-MNIST in"):
        load(f"fashion-mnist:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    "name", ["nonsense", "./nowhere", "/no/where/at all", "digits:x", "cifar10:x", "", "cifar10:"]
)
def test_unknown_names_say_what_is_allowed(name):
    with pytest.raises(
        FileNotFoundError, match=r"no data .*digits, fashion-mnist, imagenet.*owner/name"
    ):
        load(name)


def test_options_that_mean_nothing_are_refused(tmp_path):
    make_folder(tmp_path, {"a": 10})
    for data in ("digits", str(tmp_path)):
        with pytest.raises(ValueError, match="are for Hugging Face data sets"):
            load(data, label_column="label")
    for wrong in ({"limit": 0}, {"validation_share": 0.0}, {"test_share": 0.95}):
        with pytest.raises(ValueError, match="shares must be positive"):
            load(str(tmp_path), **wrong)
