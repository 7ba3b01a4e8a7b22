"""Files that are whole or absent, on systems that open no folders too."""

import os
from pathlib import Path

import pytest

from flops.storage import files


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.atomic_write(path, "before")
    files.atomic_write(path, "später\n")
    assert path.read_bytes() == "später\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    files.atomic_write(path, b"before")

    def fail() -> None:
        with files.replacing(path) as scratch:
            scratch.write_bytes(b"aft")
            raise RuntimeError("half written")

    with pytest.raises(RuntimeError, match="half"):
        fail()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_that_cannot_be_opened_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def as_on_windows(path, *args, **options):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", as_on_windows)
    files.atomic_write(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "text"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.sync_directory(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("vit-lr-seed0", "vit-lr-seed0"),
        ("hub:user/data", "hub-user-data"),
        ('a<b>c"d|e?f*g\\h\n', "a-b-c-d-e-f-g-h-"),
        ("..", "--"),
        ("name. ", "name--"),
        ("NUL", "_NUL"),
        ("com1.txt", "_com1.txt"),
        ("company", "company"),
        ("", "_"),
    ],
)
def test_names_that_every_system_takes(text: str, name: str) -> None:
    assert files.safe_name(text) == name
    assert files.safe_name(name) == name
