"""Images with captions: embedded, LLaVA-format JSON, folders, classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flops.errors import FlopsError
from flops.tasks.alignment.config import AlignConfig
from flops.tasks.data.captions import TEMPLATES
from flops.tasks.data.images import BUNDLED_FORMAT
from flops.tasks.data.pairs import CHOICES, load_pairs
from flops.training.task import open_task

WORDS = ("cat", "dog", "bird", "fish", "cup", "book", "lamp", "ball", "hat", "tie")
TEXTS = [f"a {word} on a table" for word in WORDS]


def draw(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((20, 24), value, np.uint8)).save(path)


def llava(folder: Path, count: int = 30) -> Path:
    entries = []
    for i in range(count):
        draw(folder / "pictures" / "00" / f"{i}.png", 8 * i)
        turns = [
            {"from": "human", "value": "Describe the image.\n<image>"},
            {"from": "gpt", "value": f"{TEXTS[i % 10]},\nnumber {i}"},
        ]
        entries.append({"id": str(i), "image": f"00/{i}.png", "conversations": turns})
    path = folder / "chat.json"
    path.write_text(json.dumps(entries))
    return path


def test_embedded_images_in_all_templates() -> None:
    data = load_pairs("fashion", BUNDLED_FORMAT)
    assert len(data.train) == 160 * len(TEMPLATES)
    assert (len(data.validation), len(data.test)) == (160, 1000)
    for split in (data.train, data.validation):
        of_class = {
            (int(label), text) for label, text in zip(split.labels, split.captions, strict=True)
        }
        assert len(of_class) == 10 * len(TEMPLATES)  # every class in every template
    point = 57
    choices, answer = data.validation.choices(point)
    assert choices[answer] == data.validation.captions[point]
    assert len(set(choices)) == 10
    pixels, _ = data.train.pictures.batch(torch.arange(3))
    assert pixels.shape == (3, 1, 32, 32)


def test_a_limit_counts_images_of_all_classes() -> None:
    data = load_pairs("fashion", BUNDLED_FORMAT, limit=20)
    assert len(data.train) == 20 * len(TEMPLATES)
    assert data.validation.labels.bincount().tolist() == [2] * 10


def test_llava_format(tmp_path: Path) -> None:
    path = llava(tmp_path)
    data = load_pairs(str(path), BUNDLED_FORMAT, pictures=tmp_path / "pictures")
    assert (len(data.train), len(data.validation), len(data.test)) == (24, 3, 3)
    texts = [*data.train.captions, *data.validation.captions, *data.test.captions]
    assert sorted(texts) == sorted(f"{TEXTS[i % 10]}, number {i}" for i in range(30))
    for split in (data.train, data.validation, data.test):
        values = BUNDLED_FORMAT.restore(split.pictures.batch(split.rows)[0])[:, 0, 0, 0]
        numbers = [int(text.split()[-1]) for text in split.captions]
        assert (255 * values).round().tolist() == [8 * n for n in numbers]  # each its own image


def test_free_captions_are_told_from_those_of_others(tmp_path: Path) -> None:
    data = load_pairs(str(llava(tmp_path)), BUNDLED_FORMAT, pictures=tmp_path / "pictures")
    choices, answer = data.train.choices(4)
    assert choices[answer] == data.train.captions[4]
    assert len(choices) == len(set(choices)) == CHOICES
    assert data.train.choices(4) == (choices, answer)


def test_folders_with_captions(tmp_path: Path) -> None:
    lines = []
    for i in range(12):
        draw(tmp_path / "a" / f"{i}.png", i)
        draw(tmp_path / "b" / f"{i}.png", i)
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"number {i}"}))
        (tmp_path / "b" / f"{i}.txt").write_text(f"number\n{i}\n")
    (tmp_path / "a" / "metadata.jsonl").write_text("\n".join(lines))
    for name in "ab":
        data = load_pairs(str(tmp_path / name), BUNDLED_FORMAT)
        texts = [*data.train.captions, *data.validation.captions, *data.test.captions]
        assert sorted(texts) == sorted(f"number {i}" for i in range(12))


def test_classes_of_other_data_make_captions() -> None:
    data = load_pairs("digits", BUNDLED_FORMAT, limit=20)
    label = int(data.validation.labels[0])
    assert data.validation.captions[0].endswith(f"a {label}.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "must hold a list of pairs, not a dict"),
        ('[{"image": "a.png"}]', "entry 0 of .* is not a pair"),
        ('[{"image": "a.png", "conversations": []}]', "entry 0 of .* is not a pair"),
        ("[]", "has 0 pairs: at least 10 are needed"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_pairs(str(path), BUNDLED_FORMAT)


def test_wrong_metadata_and_missing_files_are_explained(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* needs `file_name` and `text`"):
        load_pairs(str(tmp_path), BUNDLED_FORMAT)
    with pytest.raises(FileNotFoundError, match="give the LLaVA-format JSON"):
        load_pairs(str(tmp_path / "none.json"), BUNDLED_FORMAT)


def test_broken_images_are_left_out_or_refused(tmp_path: Path) -> None:
    path = llava(tmp_path)
    (tmp_path / "pictures" / "00" / "7.png").write_bytes(b"no image")
    config = AlignConfig(data=str(path), pictures=str(tmp_path / "pictures"))
    with pytest.warns(UserWarning, match="skipped 1 images"):
        task = open_task(config, torch.device("cpu"))
    data = task.data
    texts = [t for s in (data.train, data.validation, data.test) for t in s.pairs.captions]
    assert len(texts) == 29
    assert not any(text.endswith("number 7") for text in texts)
    with pytest.raises(FlopsError, match=r"7\.png"):
        open_task(config.replace(strict=True), torch.device("cpu"))
