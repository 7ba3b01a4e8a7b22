"""Images that cannot be read are left out, replaced or named."""

from __future__ import annotations

import warnings

import pytest
import torch

from flops.tasks.data import images
from flops.tasks.data.images import load
from tests.support.pictures import GREY, make_folder, shades
from tests.support.splits import SPLITS


def break_some(root):
    """Three of the images of class a can no longer be read: cut off, no image, a dead link."""
    whole = (root / "a" / "001.png").read_bytes()
    (root / "a" / "001.png").write_bytes(whole[:40])
    (root / "a" / "002.png").write_text("not an image")
    (root / "a" / "004.png").unlink()
    (root / "a" / "004.png").symlink_to(root / "nowhere.png")


def test_broken_images_are_left_out_and_counted(tmp_path):
    make_folder(tmp_path / "train", {"a": 10, "b": 10})
    before = load(str(tmp_path), GREY)
    break_some(tmp_path / "train")
    with pytest.warns(UserWarning, match=r"skipped 3 of 20 images .*first: .*\.png") as caught:
        data = load(str(tmp_path), GREY)
    assert len(caught) == 1
    assert data.skipped == 3
    for name in SPLITS:  # the others are where they were
        kept = [shade for shade in shades(getattr(before, name)) if shade not in (1, 2, 4)]
        assert shades(getattr(data, name)) == kept


@pytest.mark.parametrize("memory", [images.MEMORY, 0])
def test_strict_names_the_broken_file(tmp_path, memory):
    make_folder(tmp_path / "train", {"a": 10, "b": 10})
    (tmp_path / "train" / "a" / "003.png").write_bytes(b"")
    with pytest.raises(images.BrokenImageError, match=r"cannot read .*a.003\.png"):  # noqa: PT012
        data = load(str(tmp_path), GREY, strict=True, memory=memory)
        for name in SPLITS:
            shades(getattr(data, name))


def test_a_large_set_keeps_its_rows_when_an_image_breaks(tmp_path):
    make_folder(tmp_path / "train", {"a": 10, "b": 10})
    make_folder(tmp_path / "val", {"a": 2}, start=50)
    make_folder(tmp_path / "test", {"a": 2}, start=60)
    data = load(str(tmp_path), GREY, memory=0)
    assert shades(data.train) == list(range(20))
    break_some(tmp_path / "train")  # while training
    with pytest.warns(UserWarning, match=r"a.001\.png .*replaced by another image") as caught:
        found = shades(data.train)
    assert len(caught) == 1
    assert found == [0, 3, 3, 3, 5, *range(5, 20)]
    assert data.train.labels.tolist() == [0] * 10 + [1] * 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shades(data.train) == found
    assert data.train.stand_ins == {1: 3, 2: 3, 4: 5}
    (tmp_path / "val" / "a" / "000.png").unlink()
    with pytest.warns(UserWarning, match="replaced by another image"):
        assert shades(data.validation) == [51, 51]  # the only other one
    last = load(str(tmp_path), GREY, memory=0).train
    (tmp_path / "train" / "a" / "009.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="replaced by another image"):
        assert last.batch(torch.tensor([9]))[0].mul(255).round()[0, 0, 0, 0] == 0  # around the end


def test_no_readable_image_is_an_error(tmp_path):
    make_folder(tmp_path / "train", {"a": 4})
    make_folder(tmp_path / "val", {"a": 2})
    make_folder(tmp_path / "test", {"a": 2})
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"no validation image of .* can be read; the first: .*png"
    ):
        load(str(tmp_path), GREY)
    with pytest.raises(images.BrokenImageError, match="nor any other image of its class"):
        load(str(tmp_path), GREY, memory=0).validation.batch(torch.tensor([0]))


def test_a_class_without_training_points_is_noted(tmp_path):
    make_folder(tmp_path / "train", {"a": 8, "b": 1})
    make_folder(tmp_path / "val", {"a": 1})
    make_folder(tmp_path / "test", {"a": 1})
    (tmp_path / "train" / "b" / "000.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped 1 of 11"):
        data = load(str(tmp_path), GREY)
    assert data.notes == ("1 of 2 classes have no training points",)
