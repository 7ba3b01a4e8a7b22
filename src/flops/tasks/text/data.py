"""Labelled texts, or prompts with completions: embedded, .jsonl files, Hugging Face data sets.

A .jsonl file has one JSON object per line, {"text": ..., "label": ...} or {"prompt": ...,
"completion": ...}, optionally with its "split". A folder has train.jsonl, and optionally
validation.jsonl and test.jsonl. A missing split is held out of train.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flops.storage.plain import parse_object
from flops.tasks.data.hub import DatasetSource, is_dataset, name_splits, open_tables
from flops.tasks.data.splits import SPLIT_WORDS, hold_out
from flops.tasks.models.language import REAL_MODELS
from flops.tasks.text import garments
from flops.training.task import Splits

EMBEDDED = "garments"
SENTENCES = "sentences"  # `make real-models` brings them
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2
MOST_HELD = 1000  # largest size of a held-out split
_ALLOWED = (
    f"'{EMBEDDED}', '{SENTENCES}' (after `make real-models`), the path of a .jsonl file, of a "
    "folder with train.jsonl, or of parquet files, or a Hugging Face id, owner/name"
)


@dataclass(frozen=True)
class TextSplit:
    """Texts with classes, or prompts with completions.

    Attributes:
        texts: Text or prompt of each point.
        labels: Class of each point, (N,); 0 with completions.
        completions: Completion of each point; empty for classification.
    """

    texts: tuple[str, ...]
    labels: Tensor
    completions: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of points."""
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> TextSplit:
        """Some of the points."""
        completions = tuple(self.completions[i] for i in rows) if self.completions else ()
        return TextSplit(tuple(self.texts[i] for i in rows), self.labels[list(rows)], completions)


@dataclass(frozen=True)
class TextData(Splits[TextSplit]):
    """Three splits of texts and their metadata.

    Attributes:
        template: Prompt of a named data set; None for another.
        words: Its label words by class; empty for another.
    """

    template: str | None = None
    words: Mapping[str, str] | None = None


@dataclass(frozen=True)
class _Row:
    text: str
    label: str | int | None
    completion: str | None


def load_texts(
    data: str,
    columns: Mapping[str, str],
    *,
    splits: Mapping[str, str | None] | None = None,
    config: str | None = None,
    limit: int | None = None,
) -> TextData:
    """Load texts with labels, or prompts with completions; the same call gives the same points.

    Args:
        data: "garments", "sentences", a .jsonl file, a folder with train.jsonl, parquet files, a
            data set saved with `save_to_disk`, or a Hugging Face id.
        columns: Their names of text, label, prompt, completion and split.
        splits: Their splits for train, validation and test; None holds one out of train.
        config: Configuration of a data set of the hub.
        limit: Largest number of points per split, stratified.

    Raises:
        ImportError: A package is missing.
        OSError: The data are missing.
        ValueError: A field is missing, a text is empty, or labels do not fit.
    """
    template, words = None, None
    if data == EMBEDDED:
        template, words = (
            garments.TEMPLATE,
            dict(zip(garments.CLASSES, garments.WORDS, strict=True)),
        )
        rows = {
            split: [_Row(text, garments.CLASSES[label], None) for text, label in found]
            for split, found in garments.garments().items()
        }
        declared: tuple[str, ...] | None = garments.CLASSES
    else:
        rows, declared = _read(data, columns, splits or {}, config)
    notes = _complete(rows)
    found, classes = _coded(rows, declared)
    if limit is not None:
        for name, split in found.items():
            if len(split) > limit:
                kept = hold_out(split.labels.numpy(), limit)[1]
                found[name] = split.take(kept.tolist())
    train, validation, test = (found[name] for name in ("train", "validation", "test"))
    return TextData(train, validation, test, classes, data, tuple(notes), template, words)


def _read(
    data: str, columns: Mapping[str, str], splits: Mapping[str, str | None], config: str | None
) -> tuple[dict[str, list[_Row]], tuple[str, ...] | None]:
    """Rows by our names of splits, and the declared classes if there are any."""
    path = Path(data).expanduser()
    if data == SENTENCES:
        path = REAL_MODELS / SENTENCES
        if not path.is_dir():
            raise FileNotFoundError(
                f"no sentences in {path}: in a clone of the repository, run `make real-models` or "
                f"`python scripts/fetch_sentences.py {path}`"
            )
    if data and path.exists():
        if is_dataset(path):
            return _read_tables(DatasetSource(str(path), splits=splits), columns)
        if splits:
            raise ValueError(f"splits are for Hugging Face data sets; {data!r} has files of splits")
        return (_read_folder(path, columns) if path.is_dir() else _read_file(path, columns)), None
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data)
    if not hub_id or path.suffix in (".jsonl", ".json", ".csv", ".txt") or path.parent.is_dir():
        raise FileNotFoundError(f"no data {data!r}: give {_ALLOWED}")
    return _read_tables(DatasetSource(data, splits=splits, config=config), columns)


def _read_folder(folder: Path, columns: Mapping[str, str]) -> dict[str, list[_Row]]:
    found: dict[str, list[_Row]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        split = SPLIT_WORDS.get(path.stem.lower())
        if split is None:
            continue
        if split in found:
            raise ValueError(f"{folder} has two files for {split}; keep one")
        found[split] = _read_lines(path, columns)[0]
    if "train" not in found:
        raise ValueError(
            f"no train.jsonl in {folder}: a folder of texts needs it, with validation.jsonl and "
            "test.jsonl beside it or none"
        )
    return found


def _read_file(path: Path, columns: Mapping[str, str]) -> dict[str, list[_Row]]:
    """Rows by split: train, unless every line has its own."""
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path} is not a .jsonl file: give {_ALLOWED}")
    rows, places = _read_lines(path, columns)
    if not any(places):
        return {"train": rows}
    if None in places:
        number = 1 + places.index(None)
        raise ValueError(f"row {number} of {path} has no split, and others have one")
    found: dict[str, list[_Row]] = {}
    for row, place in zip(rows, places, strict=True):
        found.setdefault(str(place), []).append(row)
    if "train" not in found:
        raise ValueError(f"no line of {path} has the split train")
    return found


def _read_lines(path: Path, columns: Mapping[str, str]) -> tuple[list[_Row], list[str | None]]:
    """Rows of a .jsonl file, and the split of each."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from error
    rows, places = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            values = parse_object(line)
        except ValueError as error:
            raise ValueError(f"{where} is not a JSON object: {error}") from error
        rows.append(_row(values, columns, where))
        given = values.get(columns["split"])
        place = SPLIT_WORDS.get(given.lower()) if isinstance(given, str) else None
        if place is None and given is not None:
            raise ValueError(
                f"{where} has the split {given!r}; splits are {', '.join(sorted(SPLIT_WORDS))}"
            )
        places.append(place)
    if not rows:
        raise ValueError(f"{path} is empty: give one JSON object per line")
    return rows, places


def _read_tables(
    entry: DatasetSource, columns: Mapping[str, str]
) -> tuple[dict[str, list[_Row]], tuple[str, ...] | None]:
    tables = open_tables(entry, "a .jsonl file")
    names = name_splits(tuple(tables), entry.splits or {})
    feature = next(iter(tables.values())).features.get(columns["label"])
    declared = tuple(feature.names) if hasattr(feature, "names") else None
    found: dict[str, list[_Row]] = {}
    for ours, theirs in names.items():
        table = tables[theirs]
        kept = [c for c in columns.values() if c in table.column_names]
        rows = []
        for number, values in enumerate(table.select_columns(kept)):
            row = _row(values, columns, f"row {number} of {entry.source}, split {theirs}")
            if declared is not None and row.label is not None:
                row = _named(row, declared, ours)
            rows.append(row)
        found[ours] = rows
    return found, declared


def _named(row: _Row, declared: tuple[str, ...], split: str) -> _Row:
    """A row with the name of its class."""
    if not isinstance(row.label, int) or not 0 <= row.label < len(declared):
        raise ValueError(
            f"a row of the {split} split has the label {row.label!r}, and there are "
            f"{len(declared)} classes: a split without labels cannot be used, so choose another "
            "one with `splits`, such as test=validation"
        )
    return _Row(row.text, declared[row.label], row.completion)


def _row(values: Mapping[str, Any], columns: Mapping[str, str], where: str) -> _Row:
    """One row from its fields.

    Raises:
        ValueError: A field is missing, empty or of another type.
    """
    pair = columns["prompt"] in values and columns["completion"] in values
    needed = ("prompt", "completion") if pair else ("text", "label")
    if missing := [columns[name] for name in needed if values.get(columns[name]) is None]:
        raise ValueError(
            f"{where} has no {missing[0]!r}: a row needs text and label, or prompt and completion; "
            "name the fields with `columns`, such as text=sentence label=class"
        )
    text, other = (values[columns[name]] for name in needed)
    if not isinstance(text, str) or not text.strip():
        what = "is empty" if text == "" or isinstance(text, str) else f"is a {type(text).__name__}"
        raise ValueError(f"the {needed[0]} of {where} {what}: give some text, or remove the row")
    if pair:
        if not isinstance(other, str) or not other.strip():
            raise ValueError(f"the completion of {where} is empty: give some text, or remove it")
        return _Row(text, None, other)
    if isinstance(other, bool) or not isinstance(other, str | int):
        raise ValueError(f"the label of {where} is {other!r}: labels are text or whole numbers")
    return _Row(text, other, None)


def _complete(rows: dict[str, list[_Row]]) -> list[str]:
    """Hold missing splits out of train, in place; return remarks."""
    if empty := [name for name, found in rows.items() if not found]:
        raise ValueError(f"no texts in the {' and the '.join(empty)} split")
    notes, full = [], len(rows["train"])
    for name, share in (("validation", VALIDATION_SHARE), ("test", TEST_SHARE)):
        if name in rows:
            continue
        train = rows["train"]
        size = min(max(1, round(share * full)), MOST_HELD)
        if size >= len(train):
            raise ValueError(
                f"{full} training texts are too few to hold out a {name} split; give one"
            )
        labels = np.unique([str(row.label) for row in train], return_inverse=True)[1]
        rest, held = hold_out(labels, size)
        rows["train"], rows[name] = [train[i] for i in rest], [train[i] for i in held]
        notes.append(f"{name}: {size} points held out of the {full} training points, stratified")
    return notes


def _coded(
    rows: Mapping[str, Sequence[_Row]], declared: tuple[str, ...] | None
) -> tuple[dict[str, TextSplit], tuple[str, ...]]:
    """The splits with classes as numbers, and the names of the classes."""
    every = [row for found in rows.values() for row in found]
    pairs = [row for row in every if row.completion is not None]
    if pairs and len(pairs) < len(every):
        raise ValueError("some rows have a label and others a completion; give one kind of data")
    if pairs:
        return {
            name: TextSplit(
                tuple(row.text for row in found),
                torch.zeros(len(found), dtype=torch.long),
                tuple(str(row.completion) for row in found),
            )
            for name, found in rows.items()
        }, ("completion",)
    present: list[Any] = [row.label for row in rows["train"]]
    kinds = {type(label) for label in present}
    if len(kinds) > 1:
        raise ValueError("some labels are text and others numbers: give one kind")
    ordered = list(declared) if declared is not None else sorted(set(present))
    if len(ordered) < 2:
        raise ValueError(f"the data have a single class, '{ordered[0]}': nothing can be learned")
    codes = {label: code for code, label in enumerate(ordered)}
    splits = {}
    for name, found in rows.items():
        for row in found:
            if row.label not in codes:
                raise ValueError(
                    f"the label {row.label!r} of the {name} split is not among those of train: "
                    f"{', '.join(map(str, ordered[:12]))}"
                )
        labels = torch.tensor([codes[row.label] for row in found])
        splits[name] = TextSplit(tuple(row.text for row in found), labels)
    return splits, tuple(map(str, ordered))
