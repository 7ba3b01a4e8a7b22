"""Texts from files: fields, splits, labels, and what is said about those that do not fit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flops.tasks.models.language import load_language
from flops.tasks.text.config import COLUMNS
from flops.tasks.text.data import TextData, load_texts
from flops.tasks.text.garments import CLASSES, TEMPLATE, WORDS, garments

NAMES = {name: name for name in COLUMNS}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {i}", "label": "ab"[i % 2], **more} for i in range(count)]


def load(path: Path, **options: Any) -> TextData:
    return load_texts(str(path), {**NAMES, **options.pop("columns", {})}, **options)


def test_embedded_texts_are_balanced_different_and_in_words_of_the_model() -> None:
    found = garments()
    language, texts = load_language(), [text for of in found.values() for text, _ in of]
    assert len(set(texts)) == len(texts) == 720
    for of in found.values():
        assert Counter(label for _, label in of) == {0: len(of) // 2, 1: len(of) // 2}
    unknown = language.tokenizer.unk_token_id
    for text in (*texts, TEMPLATE.format(text=""), *WORDS):
        assert unknown not in language.tokens(text), text
    assert not any(word in text.split() for text in texts for word in (f"{w}." for w in WORDS))
    data = load_texts("garments", NAMES, limit=20)
    assert (len(data.train), len(data.test), data.classes) == (20, 20, CLASSES)


def test_a_file_is_split_by_holding_out(tmp_path: Path) -> None:
    data = load(written(tmp_path / "a.jsonl", *rows(100)))
    assert (len(data.train), len(data.validation), len(data.test)) == (70, 10, 20)
    assert data.classes == ("a", "b")
    assert Counter(data.test.labels.tolist()) == {0: 10, 1: 10}
    every = {*data.train.texts, *data.validation.texts, *data.test.texts}
    assert len(every) == 100
    for text, label in zip(data.train.texts, data.train.labels.tolist(), strict=True):
        assert int(text.split()[1]) % 2 == label
    assert [note.split(":")[0] for note in data.notes] == ["validation", "test"]


def test_a_folder_and_a_field_have_splits(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", *rows(10))
    written(tmp_path / "val.jsonl", *rows(6))
    written(tmp_path / "test.jsonl", *rows(4))
    data = load(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 6, 4)
    parts = [*rows(8, split="train"), *rows(4, split="dev"), *rows(2, split="test")]
    data = load(written(tmp_path / "all.jsonl", *parts))
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 4, 2)


def test_fields_can_have_other_names_and_labels_be_numbers(tmp_path: Path) -> None:
    given = [{"sentence": f"s {i}", "class": i % 3} for i in range(30)]
    path = written(tmp_path / "a.jsonl", *given)
    data = load(path, columns={"text": "sentence", "label": "class"})
    assert data.classes == ("0", "1", "2")
    pairs = [{"question": f"q {i}", "completion": f"a {i}"} for i in range(20)]
    data = load(written(tmp_path / "b.jsonl", *pairs), columns={"prompt": "question"})
    assert data.train.completions[0] == f"a {data.train.texts[0].split()[1]}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"text": "a"}], "line 1 of .* has no 'label': a row needs text and label, or prompt"),
        ([*rows(1), {"label": "a"}], "line 2 of .* has no 'text'"),
        ([{"text": " ", "label": "a"}], "the text of line 1 of .* is empty: give some text"),
        ([{"text": 3, "label": "a"}], "the text of line 1 of .* is a int"),
        ([{"prompt": "a", "completion": ""}], "the completion of line 1 of .* is empty"),
        ([{"text": "a", "label": 0.5}], "is 0.5: labels are text or whole numbers"),
        ([["a"]], "line 1 of .* is not a JSON object"),
        ([], "is empty: give one JSON object per line"),
        ([{"text": "a", "label": "x"}] * 9, "single class, 'x': nothing can be learned"),
        ([*rows(9), {"text": "a", "label": 1}], "some labels are text and others numbers"),
        ([*rows(9), {"prompt": "a", "completion": "b"}], "some rows have a label and others"),
        (rows(2), "2 training texts are too few to hold out a test split"),
    ],
)
def test_what_does_not_fit_is_said(given: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path / "a.jsonl", *given))


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no data 'none.jsonl': give 'garments'"):
        load(Path("none.jsonl"))
    with pytest.raises(FileNotFoundError, match="run `make real-models`"):
        load_texts("sentences", NAMES)
    with pytest.raises(ValueError, match=r"no train.jsonl in"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match=r"a.csv is not a .jsonl file"):
        load(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is not a JSON object"):
        load(tmp_path / "b.jsonl")
    parts = [*rows(4, split="train"), {"text": "new", "label": "c", "split": "test"}]
    with pytest.raises(ValueError, match="label 'c' of the test split is not among those of train"):
        load(written(tmp_path / "c.jsonl", *parts))


def test_a_saved_data_set_with_named_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    values = {"text": [f"t {i}" for i in range(20)], "label": [i % 2 for i in range(20)]}
    table = datasets.Dataset.from_dict(values, features=features)
    unlabelled = datasets.Dataset.from_dict({"text": ["t"], "label": [-1]}, features=features)
    datasets.DatasetDict({"train": table, "test": unlabelled}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ValueError, match="label -1, and there are 2 classes: a split without"):
        load(tmp_path / "set")
    data = load(tmp_path / "set", splits={"test": None})
    assert data.classes == ("no", "yes")
    assert len(data.train) == 14


def test_a_split_that_is_misspelt_or_missing_is_said(tmp_path: Path) -> None:
    """Else rows of the test would be trained on."""
    given = [*rows(6, split="train"), *rows(3, split="test")]
    given[7]["split"] = "tset"
    with pytest.raises(ValueError, match=r"line 8 of .* has the split 'tset'"):
        load(written(tmp_path / "a.jsonl", *given))
    del given[7]["split"]
    with pytest.raises(ValueError, match=r"row 8 of .* has no split, and others have one"):
        load(written(tmp_path / "a.jsonl", *given))
