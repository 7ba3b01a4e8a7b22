"""Images by name or path: folders, Hugging Face datasets, embedded data; broken files; splits."""

from __future__ import annotations

import io
import random
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from flops.errors import FlopsError
from flops.tasks.classification import accuracy, digits
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.data import images
from flops.tasks.data.hub import NAMED
from flops.tasks.data.images import ImageFormat, load
from flops.tasks.data.pixels import decode
from flops.tasks.data.splits import LazySplit, StoredSplit, hold_out
from flops.training.trainer import Trainer

datasets = pytest.importorskip("datasets")

GREY = ImageFormat(8, 1, (0.0,), (1.0,))
RGB = ImageFormat(8, 3, (0.5, 0.4, 0.3), (0.5, 0.25, 0.2))
SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def picture(value, size=(8, 8), mode="L"):
    return Image.new(mode, size, value if mode == "L" else (value,) * len(mode))


def make_folder(root, counts, *, start=0, size=(8, 8), mode="L"):
    """Images of one shade each: start, start + 1, ... in the order of classes and names."""
    shade = start
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(shade, size, mode).save(root / name / f"{i:03}.png")
            shade += 1
    return root


def shades(split, format=GREY):
    """Return what make_folder wrote: the value of each image, in the order of the rows."""
    pixels, labels = split.batch(torch.arange(len(split)))
    assert pixels.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.equal(labels, split.labels)
    assert pixels.shape == (len(split), format.channels, format.size, format.size)
    values = format.restore(pixels).mul(255).round().long().flatten(1)
    assert (values == values[:, :1]).all()
    return values[:, 0].tolist()


def table(n, classes=3, *, image="image", label="label", start=0, encode=True, names=None):
    """A data set as the hub has them: encoded images, class labels with names."""
    names = names or [f"class {i}" for i in range(classes)]
    columns = {
        image: [picture(start + i) for i in range(n)],
        label: [i % classes for i in range(n)],
    }
    features = {image: datasets.Image(), label: datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def raw(value, **options):
    buffer = io.BytesIO()
    picture(value, **options).save(buffer, "PNG")
    return buffer.getvalue()


# --- folders


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


def test_the_same_call_gives_the_same_rows_however_files_were_written(tmp_path):
    first = make_folder(tmp_path / "first", {"a": 20, "b": 20})
    for path in sorted(first.rglob("*.png"), reverse=True):
        copy = tmp_path / "second" / path.relative_to(first)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (tmp_path / "second" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "second" / "a" / "._000.png").write_text("no image")
    (tmp_path / "second" / ".cache").mkdir()
    state = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    one, other = load(str(first), GREY), load(str(tmp_path / "second"), GREY, memory=0)
    for name in SPLITS:
        assert shades(getattr(one, name)) == shades(getattr(other, name))
    assert state == (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def test_images_below_their_class_folder_and_in_other_formats(tmp_path):
    make_folder(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a" / "deep").mkdir()
    picture(200).save(tmp_path / "a" / "deep" / "x.BMP")
    data = load(str(tmp_path), GREY)
    assert sum(len(getattr(data, name)) for name in SPLITS) == 11


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


# --- broken images


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


# --- pixels


def test_grey_becomes_rgb_and_is_normalised_channel_by_channel(tmp_path):
    make_folder(tmp_path, {"a": 20}, start=100)
    data = load(str(tmp_path), RGB)
    pixels, _ = data.train.batch(torch.tensor([0]))
    shade = shades(load(str(tmp_path), GREY).train)[0] / 255
    expected = [(shade - m) / s for m, s in zip(RGB.mean, RGB.std, strict=True)]
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-5)


def test_rgb_becomes_grey():
    image = Image.new("RGB", (8, 8), (10, 200, 60))
    found = decode(image, GREY)
    assert found.shape == (1, 8, 8)
    assert found[0, 0, 0] == round(0.299 * 10 + 0.587 * 200 + 0.114 * 60)
    assert decode(image, RGB)[:, 0, 0].tolist() == [10, 200, 60]


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK", "I;16", "I"])
@pytest.mark.parametrize("format", [GREY, RGB])
def test_every_mode_is_read(tmp_path, mode, format):
    values = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8)
    image = Image.fromarray(values)
    if mode.startswith("I"):
        image = Image.fromarray(values.astype(np.uint16) * 257)
    if mode != "I;16":
        image = image.convert(mode)
    suffix = "tif" if mode in ("CMYK", "I") else "png"
    image.save(tmp_path / f"x.{suffix}", **({"transparency": b"\0\1"} if mode == "P" else {}))
    with warnings.catch_warnings(), Image.open(tmp_path / f"x.{suffix}") as stored:
        warnings.simplefilter("error")
        found = decode(stored, format)
    assert found.shape == (format.channels, 8, 8)
    if mode != "1":
        assert np.abs(found - values.astype(int)).max() <= 1


def test_images_of_floats_are_read_by_their_range():
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    for scale in (1, 255):
        found = decode(Image.fromarray(scale * values), GREY)
        assert np.abs(found - 255 * values).max() <= 1
    for bad in (-0.1, 300.0, float("nan")):
        with pytest.raises(ValueError, match="needs values in"):
            decode(Image.fromarray(np.full((8, 8), bad, np.float32)), GREY)


def test_long_images_are_cut_to_the_centre():
    values = np.zeros((20, 60), np.uint8)
    values[:, 20:40] = 255  # the centred square
    for array in (values, values.T):
        found = decode(Image.fromarray(array), GREY)[0]
        found = found if array is values else found.T
        assert (found[:, 1:-1] == 255).all()
        assert (found[:, [0, -1]] > 200).all()  # smoothed with what lies beside it


def test_resizing_is_bilinear_with_smoothing_and_as_resize_then_crop():
    values = np.random.RandomState(0).randint(0, 256, (40, 60), dtype=np.uint8)
    image = Image.fromarray(values)
    small = image.resize((12, 8), Image.Resampling.BILINEAR).crop((2, 0, 10, 8))
    assert np.abs(decode(image, GREY)[0] - np.asarray(small, int)).max() <= 2
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    assert np.abs(decode(Image.fromarray(stripes), GREY)[0] - 127.5).max() < 20


def test_photos_are_turned_upright(tmp_path):
    values = np.zeros((8, 8), np.uint8)
    values[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees
    Image.fromarray(values).save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as image:
        found = decode(image, GREY)[0]
    assert (found[:, -1] == 255).all()
    assert not found[:, :-1].any()


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 1, (0.5,), (0.5,)),
        (8, 2, (0.5,) * 2, (0.5,) * 2),
        (8, 3, (0.5,), (0.5,)),
        (8, 1, (0.5,), (0.0,)),
    ],
)
def test_formats_that_no_image_has(wrong):
    with pytest.raises(ValueError, match="need"):
        ImageFormat(*wrong)


# --- Hugging Face datasets


def named_copy(name):
    """A small data set in the format of a named one, under its own names of splits."""
    entry = NAMED[name]
    theirs = {
        "imagenet": ("train", "validation", "test"),
        "food101": ("train", "validation"),
        "eurosat": ("train", "validation", "test"),
        "flowers102": ("train", "validation", "test"),
    }.get(name, ("train", "test"))
    made = {
        split: table(30 - 6 * i, image=entry.image, label=entry.label, start=50 * i)
        for i, split in enumerate(theirs)
    }
    if name == "imagenet":  # its test labels are not public
        made["test"] = made["test"].map(lambda row: {"label": -1}, features=made["test"].features)
    if name == "cifar100":
        for split, found in made.items():
            coarse = datasets.ClassLabel(names=["x", "y"])
            made[split] = found.add_column("coarse_label", [0] * len(found)).cast_column(
                "coarse_label", coarse
            )
    return datasets.DatasetDict(made)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["disk", "parquet"])
def test_named_data_sets_from_a_copy(tmp_path, name, kind, capfd):
    copy = named_copy(name)
    if kind == "disk":
        copy.save_to_disk(tmp_path / "copy")
    else:
        (tmp_path / "copy" / "data").mkdir(parents=True)
        for split, part in copy.items():
            part.to_parquet(tmp_path / "copy" / "data" / f"{split}-00000-of-00001.parquet")
    capfd.readouterr()
    data = load(f"{name}:{tmp_path / 'copy'}", GREY)
    assert capfd.readouterr().err == ""  # no progress bars
    assert data.classes == ("class 0", "class 1", "class 2")
    official = "validation" in copy and NAMED[name].splits is None
    assert [len(getattr(data, split)) for split in SPLITS] == (
        [30, 24, 18] if official else [27, 3, 24]
    )
    assert len(data.notes) == (0 if official else 1)
    assert shades(data.test) == list(range(100, 118) if official else range(50, 74))
    for split in SPLITS:
        part = getattr(data, split)
        assert part.labels.tolist() == [shade % 50 % 3 for shade in shades(part)]


def test_a_path_needs_no_name(tmp_path):
    table(40).save_to_disk(tmp_path / "one")
    data = load(str(tmp_path / "one"), GREY)
    assert [len(getattr(data, split)) for split in SPLITS] == [28, 4, 8]
    table(40).to_parquet(tmp_path / "x.parquet")
    again = load(str(tmp_path / "x.parquet"), RGB, memory=0)
    assert shades(again.train, RGB) == shades(data.train)


def test_broken_images_in_a_data_set(tmp_path):
    cells = [{"bytes": raw(i), "path": f"{i}.png"} for i in range(20)]
    cells[3] = {"bytes": raw(3)[:50], "path": "3.png"}
    cells[5] = {"bytes": None, "path": str(tmp_path / "gone.png")}
    cells[7] = None
    columns = {"image": cells, "label": [i % 2 for i in range(20)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    with pytest.warns(UserWarning, match="skipped 3 of 20 images"):
        data = load(str(tmp_path / "set"), GREY)
    assert data.skipped == 3
    seen = [shade for split in SPLITS for shade in shades(getattr(data, split))]
    assert sorted(seen) == sorted(set(range(20)) - {3, 5, 7})
    with pytest.raises(images.BrokenImageError, match=r"cannot read row \d of .*split train"):
        load(str(tmp_path / "set"), GREY, strict=True)


def grocery_like(tmp_path, **more):
    """Bytes, text labels and a column of splits in one parquet file, as pandas writes it."""
    rows = range(24)
    columns = {
        "dataset": [("train", "val", "test")[i % 3] for i in rows],
        "coarse": ["fruit" for i in rows],
        "fine": [("pear", "apple")[i // 3 % 2] for i in rows],
        "image_data": [raw(i) for i in rows],
        **more,
    }
    path = tmp_path / "photos" / "images2.parquet"
    path.parent.mkdir()
    datasets.Dataset.from_dict(columns).to_parquet(path)
    (path.parent / "train_list.txt").write_text("x")
    return path.parent


def test_bytes_text_labels_and_a_column_of_splits(tmp_path):
    folder = grocery_like(tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot detect the label column: none fits.*label_column"
    ):
        load(str(folder), GREY)
    data = load(str(folder), GREY, label_column="fine")
    assert data.classes == ("apple", "pear")
    for offset, split in enumerate(SPLITS):
        assert shades(getattr(data, split)) == list(range(offset, 24, 3))
        assert getattr(data, split).labels.tolist() == [1, 0] * 4
    same = load(str(folder), GREY, label_column="fine", split_column="dataset")
    assert shades(same.test) == shades(data.test)
    whole = load(str(folder), GREY, label_column="fine", splits={"train": "train"})
    assert sum(len(getattr(whole, split)) for split in SPLITS) == 24
    assert len(whole.notes) == 2


def test_options_that_do_not_fit_the_data_set(tmp_path):
    folder = str(grocery_like(tmp_path, extra=[b"x"] * 24, none=[None, *["a"] * 23]))
    with pytest.raises(ValueError, match=r"2 candidates \(image_data, extra\)"):
        load(folder, GREY, label_column="fine")
    with pytest.raises(ValueError, match="no label column 'nope'; the columns are dataset, coarse"):
        load(folder, GREY, label_column="nope")
    chosen = {"image_column": "image_data", "label_column": "fine"}
    with pytest.raises(ValueError, match="the column 'fine' holds"):
        load(folder, GREY, image_column="fine", label_column="fine")
    with pytest.raises(ValueError, match="cannot split by the column 'fine'"):
        load(folder, GREY, split_column="fine", **chosen)
    with pytest.raises(ValueError, match="not both"):
        load(folder, GREY, split_column="dataset", splits={"test": "train"}, **chosen)
    with pytest.raises(ValueError, match="no split 'nope'; the data set has train"):
        load(folder, GREY, splits={"test": "nope"}, **chosen)
    with pytest.raises(ValueError, match="splits are train, validation and test, got dev"):
        load(folder, GREY, splits={"dev": "train"}, **chosen)
    with pytest.raises(ValueError, match="a split cannot be used twice"):
        load(folder, GREY, splits={"test": "train"}, **chosen)
    with pytest.raises(ValueError, match="label None; allowed are 'a' to 'a'"):
        load(folder, GREY, image_column="image_data", label_column="none")
    with pytest.raises(ValueError, match="labels are text or whole numbers"):
        load(folder, GREY, image_column="image_data", label_column="extra")


def test_splits_are_chosen_by_settings(tmp_path):
    named_copy("imagenet").save_to_disk(tmp_path / "copy")  # its test split has no labels
    base = FinetuneConfig(data=str(tmp_path / "copy"), method="bp", batch=8)
    with pytest.raises(FlopsError, match="choose another one with `splits`, such as test="):
        Trainer(base)
    chosen = base.replace(splits=("test=validation", "validation=none"))
    assert len(Trainer(chosen).data.test) == 24


def test_a_mistyped_path_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no data 'photos/trian'"):
        load("photos/trian", GREY)


def test_parquet_files_that_do_not_fit_each_other_are_a_plain_error(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "train-0.parquet")
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "train-1.parquet")
    with pytest.raises(ValueError, match="cannot read the data set in"):
        load(str(tmp_path), GREY)


def test_labels_out_of_range(tmp_path):
    copy = named_copy("imagenet")
    copy.save_to_disk(tmp_path / "copy")
    with pytest.raises(
        ValueError, match=r"point 0 of the test split has the label -1; allowed are 0 to 2"
    ):
        load(str(tmp_path / "copy"), GREY)
    assert len(load(str(tmp_path / "copy"), GREY, splits={"test": None}).test) == 6
    made = {"train": [{"image": raw(i), "label": i % 2 + 5} for i in range(9)]}
    made["test"] = [{"image": raw(i), "label": 7} for i in range(3)]
    for name, rows in made.items():
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "plain" / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"the label 7; allowed are 5 to 6 \(2 classes\)"):
        load(str(tmp_path / "plain"), GREY)
    data = load(str(tmp_path / "plain" / "train.parquet"), GREY)
    assert data.classes == ("5", "6")


def test_parquet_files_whose_split_is_unclear_or_that_are_none(tmp_path):
    for name in ("train", "more"):
        table(6).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"have a split and others do not: more\.parquet"):
        load(str(tmp_path), GREY)
    (tmp_path / "more.parquet").write_text("nothing")
    with pytest.raises(ValueError, match="cannot read the data set in"):
        load(str(tmp_path / "more.parquet"), GREY)


def test_an_unreachable_hub_says_what_works(monkeypatch):
    def refuse(name, config, *, trust_remote_code):
        assert name == "uoft-cs/cifar10"
        assert not trust_remote_code
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    for name in ("cifar10", "uoft-cs/cifar10"):
        with pytest.raises(OSError, match=r"'uoft-cs/cifar10' .*no network.*local path works"):
            load(name, GREY)


def test_without_datasets_the_advice_is_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets.*pip install .*\[data\]"):
        load("cifar10", GREY)


# --- names, embedded data


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
    from tests.tasks.models.test_bundled_vit import (
        TEST_IMAGES,
        TEST_LABELS,
        TRAIN_IMAGES,
        TRAIN_LABELS,
        write_idx,
    )

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
