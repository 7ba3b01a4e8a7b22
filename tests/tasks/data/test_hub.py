"""Hugging Face datasets: named ones, local copies, columns, splits, and the hub out of reach."""

from __future__ import annotations

import pytest

from flops.errors import FlopsError
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.data import images
from flops.tasks.data.hub import NAMED
from flops.tasks.data.images import load
from flops.training.trainer import Trainer
from tests.support.pictures import GREY, RGB, picture, raw, shades
from tests.support.splits import SPLITS

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(n, classes=3, *, image="image", label="label", start=0, encode=True, names=None):
    """A data set as the hub has them: encoded images, class labels with names."""
    names = names or [f"class {i}" for i in range(classes)]
    columns = {
        image: [picture(start + i) for i in range(n)],
        label: [i % classes for i in range(n)],
    }
    features = {image: datasets.Image(), label: datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


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
