"""Images with captions: embedded, a LLaVA-format JSON, a folder with captions, or class names.

For data with classes, captions are made from class names in several templates, and accuracy is
measured against the captions of the other classes. Free captions are compared with those of other
images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flops.storage.plain import parse_json, parse_object
from flops.tasks.data import images
from flops.tasks.data.captions import TEMPLATES, class_captions
from flops.tasks.data.fashion import fashion_shots
from flops.tasks.data.folders import EXTENSIONS, Files
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.data.splits import ImageSplit, LazySplit, Listing, StoredSplit, hold_out
from flops.training.task import Splits

if TYPE_CHECKING:
    pass

EMBEDDED = "fashion"
CHOICES = 10  # captions to choose from, if captions are free
MOST_HELD = 1000  # largest size of a held-out split
METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class PairSplit:
    """Points: pairs of image and caption; several may share an image.

    Attributes:
        pictures: The images.
        rows: Image of each point, (N,).
        captions: Caption of each point.
        labels: Class of each point, (N,); 0 without classes.
        names: Names of the classes; empty if captions are free.
        templates: Template of each caption, (N,); unused if captions are free.
    """

    pictures: ImageSplit
    rows: Tensor
    captions: tuple[str, ...]
    labels: Tensor
    names: tuple[str, ...] = ()
    templates: Tensor | None = None

    def __len__(self) -> int:
        """Number of points."""
        return len(self.captions)

    def choices(self, point: int) -> tuple[list[str], int]:
        """Captions to choose from, and the index of the correct one."""
        if self.names:
            template = 0 if self.templates is None else int(self.templates[point])
            return class_captions(self.names, template), int(self.labels[point])
        own = self.captions[point]
        # Always the same: numpy guarantees the stream of this legacy generator.
        order = np.random.RandomState(point).permutation(len(self))[: 3 * CHOICES]
        others = dict.fromkeys(self.captions[i] for i in order.tolist())
        others.pop(own, None)
        return [own, *list(others)[: CHOICES - 1]], 0

    def without(self, broken: set[int]) -> PairSplit:
        """The split without the points of some images."""
        if not broken:
            return self
        kept = [i for i, row in enumerate(self.rows.tolist()) if row not in broken]
        return replace(
            self,
            rows=self.rows[kept],
            captions=tuple(self.captions[i] for i in kept),
            labels=self.labels[kept],
            templates=None if self.templates is None else self.templates[kept],
        )


PairData = Splits[PairSplit]


def load_pairs(
    data: str,
    format: ImageFormat,
    *,
    pictures: Path | None = None,
    limit: int | None = None,
    strict: bool = False,
) -> PairData:
    """Load images with captions, as an encoder reads them.

    Args:
        data: "fashion", the embedded images; a LLaVA-format .json file, a list of objects with
            `image` and `conversations`, whose first answer is the caption; a folder with captions,
            in metadata.jsonl (`file_name` and `text`) or in a .txt file beside each image; or
            anything that `flops.tasks.data.images.load` accepts, with captions from class names.
        format: Image format of the encoder.
        pictures: Folder of the images of a JSON file; None for the folder of the file.
        limit: Largest number of images per split.
        strict: Raise on an unreadable image of data with classes.

    Raises:
        OSError: The data are missing.
        ValueError: The data are invalid.
    """
    if data == EMBEDDED:
        return _fashion(format, limit)
    path = Path(data).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _free(data, read_llava(path, pictures or path.parent), format, limit)
    if path.is_dir() and (found := read_folder_captions(path)):
        return _free(data, found, format, limit)
    if path.suffix == ".json":
        raise FileNotFoundError(f"no file {path}: give the LLaVA-format JSON of the captions")
    loaded = images.load(data, format, limit=limit, strict=strict)
    splits = (loaded.train, loaded.validation, loaded.test)
    return _of_classes(splits, loaded.classes, data, loaded.notes)


def _fashion(format: ImageFormat, limit: int | None) -> PairData:
    shots = fashion_shots(shift=False)
    splits = []
    for split in (shots.train, shots.validation, shots.test):
        pixels = F.pad(split.pixels[:limit, None], (2, 2, 2, 2))  # (N, 1, 32, 32)
        splits.append(StoredSplit(pixels, split.labels[:limit], format))
    return _of_classes(splits, shots.classes, EMBEDDED, ())


def _of_classes(
    splits: Sequence[ImageSplit],
    classes: tuple[str, ...],
    name: str,
    notes: tuple[str, ...],
) -> PairData:
    """Captions from class names: training images in all templates, the others in one each."""
    count, train = len(TEMPLATES), splits[0]
    every = torch.arange(len(train)).repeat_interleave(count)
    found = [_named(train, every, torch.arange(len(every)) % count, classes)]
    for split in splits[1:]:
        rows = torch.arange(len(split))
        # By rank within the class: embedded classes alternate with the same period as templates.
        ranks = torch.zeros(len(split), dtype=torch.long)
        for label in range(len(classes)):
            of_class = split.labels == label
            ranks[of_class] = torch.arange(int(of_class.sum()))
        found.append(_named(split, rows, ranks % count, classes))
    return PairData(found[0], found[1], found[2], classes, name, notes)


def _named(
    pictures: ImageSplit, rows: Tensor, templates: Tensor, classes: tuple[str, ...]
) -> PairSplit:
    labels = pictures.labels[rows]
    made = [class_captions(classes, template) for template in range(len(TEMPLATES))]
    pairs = zip(templates.tolist(), labels.tolist(), strict=True)
    captions = tuple(made[template][label] for template, label in pairs)
    return PairSplit(pictures, rows, captions, labels, classes, templates)


def _free(name: str, pairs: Mapping[Path, str], format: ImageFormat, limit: int | None) -> PairData:
    """Split a list of pairs: a tenth each, at most 1,000, is held out for validation and test."""
    if len(pairs) < 10:
        raise ValueError(f"{name} has {len(pairs)} pairs: at least 10 are needed to hold some out")
    files, captions = Files(tuple(pairs)), tuple(pairs.values())
    size = min(MOST_HELD, max(2, len(pairs) // 10))
    rest, held = hold_out(np.zeros(len(pairs), dtype=np.int64), 2 * size)
    parts = [part[:limit] for part in (rest, held[:size], held[size:])]
    splits = []
    for part in parts:
        labels = np.zeros(len(part), dtype=np.int64)
        pictures = LazySplit(Listing(files, part, labels), format, strict=True)
        texts = tuple(captions[i] for i in part.tolist())
        splits.append(PairSplit(pictures, torch.arange(len(part)), texts, torch.from_numpy(labels)))
    note = f"validation and test: {size} pairs each held out of {len(pairs)}"
    return PairData(splits[0], splits[1], splits[2], ("",), name, (note,))


def read_llava(path: Path, pictures: Path) -> dict[Path, str]:
    """Captions by image of a LLaVA-format file: the first answer of each conversation.

    Raises:
        ValueError: It is not a list of objects with `image` and `conversations`.
    """
    try:
        entries = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of pairs, not a {type(entries).__name__}")
    found: dict[Path, str] = {}
    for number, entry in enumerate(entries):
        try:
            answers = [turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt"]
            found[pictures / entry["image"]] = _plain(answers)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"entry {number} of {path} is not a pair: it needs `image` and `conversations` "
                "with turns of `from` and `value`, one of them from gpt"
            ) from error
    return found


def read_folder_captions(folder: Path) -> dict[Path, str]:
    """Captions by image of a folder; empty if it has none.

    Raises:
        ValueError: A line of metadata.jsonl is invalid.
    """
    file = folder / METADATA
    if file.is_file():
        found: dict[Path, str] = {}
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                entry = parse_object(line)
                found[folder / entry["file_name"]] = _plain([entry["text"]])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} of {file} needs `file_name` and `text`") from error
        return found
    pictures = (p for p in sorted(folder.rglob("*")) if p.suffix.lower() in EXTENSIONS)
    beside = {p: p.with_suffix(".txt") for p in pictures}
    return {p: _caption(t) for p, t in beside.items() if t.is_file()}


def _caption(path: Path) -> str:
    try:
        return _plain([path.read_text(encoding="utf-8")])
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption in {path} is not UTF-8: {error}") from error


def _plain(texts: Sequence[Any]) -> str:
    """The first text, without line breaks."""
    return " ".join(str(texts[0]).split())
