"""The script that fetches sentences: what is read of an archive, and the splits."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flops.tasks.text.config import COLUMNS
from flops.tasks.text.data import load_texts
from tests.support.scripts import call_script, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("fetch_sentences")


def archive(path: Path, each: int) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for source in ("imdb", "amazon", "yelp", "../evil"):
            rows: list[Any] = [{"text": f"{source} {i} ", "class": i % 2} for i in range(2 * each)]
            rows += [{"text": "", "class": None}, rows[0]]
            content = json.dumps(rows).encode()
            member = tarfile.TarInfo(f"package/test/fixtures/{source}.json")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


def test_splits_are_balanced_disjoint_and_readable(script: ModuleType, tmp_path: Path) -> None:
    splits = script.split(script.read(archive(tmp_path / "a.tgz", 420)))
    sizes = {name: len(rows) for name, rows in splits.items()}
    assert sizes == {"train": 1000, "validation": 500, "test": 1000}
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts)
    for rows in splits.values():
        counts = Counter((row["label"], row["source"]) for row in rows)
        assert len(counts) == 6
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all((int(r["text"].split()[1]) % 2 == 1) == (r["label"] == "positive") for r in rows)
    script.write(splits, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "test.jsonl",
        "train.jsonl",
        "validation.jsonl",
    ]
    data = load_texts(str(tmp_path / "out"), {name: name for name in COLUMNS})
    assert data.classes == ("negative", "positive")
    assert splits == script.split(script.read(tmp_path / "a.tgz"))


def test_another_archive_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = archive(tmp_path / "a.tgz", 420)
    with pytest.raises(SystemExit, match="its checksum is another"):
        call_script(monkeypatch, "fetch_sentences", tmp_path / "out", "--archive", other)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="too few for the splits"):
        script.split(script.read(archive(tmp_path / "b.tgz", 100)))
