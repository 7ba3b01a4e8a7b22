"""Folders of images: a folder a class, splits, and what is not as it should be."""

from __future__ import annotations

import shutil

import pytest

from flops.tasks.data.images import load
from tests.support.pictures import GREY, make_folder, picture, shades
from tests.support.random_state import global_random_state
from tests.support.splits import SPLITS


def test_folder_with_three_splits(tmp_path):
    make_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    make_folder(tmp_path / "val", {"cat": 1, "dog": 1}, start=50)
    make_folder(tmp_path / "Test", {"dog": 2}, start=100)
    data = load(str(tmp_path), GREY)
    assert data.classes == ("cat", "dog")
    assert data.notes == ()
    assert data.skipped == 0
    assert shades(data.train) == [0, 1, 2, 3, 4]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert shades(data.validation) == [50, 51]
    assert shades(data.test) == [100, 101]
    assert data.test.labels.tolist() == [1, 1]


def test_the_same_call_gives_the_same_rows_however_files_were_written(tmp_path):
    first = make_folder(tmp_path / "first", {"a": 20, "b": 20})
    for path in sorted(first.rglob("*.png"), reverse=True):
        copy = tmp_path / "second" / path.relative_to(first)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (tmp_path / "second" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "second" / "a" / "._000.png").write_text("no image")
    (tmp_path / "second" / ".cache").mkdir()
    state = global_random_state()
    one, other = load(str(first), GREY), load(str(tmp_path / "second"), GREY, memory=0)
    for name in SPLITS:
        assert shades(getattr(one, name)) == shades(getattr(other, name))
    assert global_random_state() == state


def test_images_below_their_class_folder_and_in_other_formats(tmp_path):
    make_folder(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a" / "deep").mkdir()
    picture(200).save(tmp_path / "a" / "deep" / "x.BMP")
    data = load(str(tmp_path), GREY)
    assert sum(len(getattr(data, name)) for name in SPLITS) == 11


def test_folders_that_are_not_as_they_should_be(tmp_path):
    with pytest.raises(ValueError, match=r"no class folders in .*train/<class>"):
        load(str(tmp_path), GREY)
    picture(0).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="no class folders"):
        load(str(tmp_path), GREY)
    with pytest.raises(ValueError, match=r"x\.png is a file"):
        load(str(tmp_path / "x.png"), GREY)
    make_folder(tmp_path / "train", {"a": 5, "b": 5})
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*c has no images"):
        load(str(tmp_path), GREY)
    (tmp_path / "train" / "c").rmdir()
    make_folder(tmp_path / "val", {"z": 1})
    with pytest.raises(ValueError, match=r"z is not a class .* a, b"):
        load(str(tmp_path), GREY)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"no class folders in .*val"):
        load(str(tmp_path), GREY)
    (tmp_path / "valid").mkdir()
    with pytest.raises(ValueError, match="two folders for validation: val and valid"):
        load(str(tmp_path), GREY)
    shutil.rmtree(tmp_path / "train")
    (tmp_path / "valid").rmdir()
    with pytest.raises(ValueError, match="has validation and no train"):
        load(str(tmp_path), GREY)
    make_folder(tmp_path / "few" / "train", {"a": 1})
    with pytest.raises(ValueError, match="too few to hold out a validation split"):
        load(str(tmp_path / "few"), GREY)
