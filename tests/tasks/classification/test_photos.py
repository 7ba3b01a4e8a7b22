"""Real images: Fashion-MNIST and photos of groceries, and the scripts that prepare the latter."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flops.cli.main import main
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER
from flops.tasks.data.images import BUNDLED_FORMAT, load
from flops.tasks.models.vit import image_format, load_model
from tests.tasks.data.test_images import SPLITS, raw

parquet = pytest.importorskip("pyarrow.parquet")


def script(name):
    path = Path(__file__).parents[3] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    module.main()


def finetune(folder, *arguments):
    """Run the command; return its evaluations: the first is before training."""
    main(["finetune", "--test", "--output", str(folder), *map(str, arguments)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"]


# --- the scripts


def grocery_table(folder, rows):
    """A table as the package has it, of (split, class, shade)."""
    splits, classes, shades = zip(*rows, strict=True)
    columns = {"dataset": splits, "finegrained_cat": classes, "image_data": [*map(raw, shades)]}
    import pyarrow

    parquet.write_table(pyarrow.table({k: list(v) for k, v in columns.items()}), folder / "t")
    return folder / "t"


def test_groceries_are_written_once_and_split_anew(tmp_path):
    fruit = ("Kiwi", "Lime")
    rows = [("train", fruit[i % 2], i) for i in range(36)]
    rows += [("val", "Kiwi", 50 + i) for i in range(4)]  # the package has none of Lime
    test = [("test", fruit[i % 2], 100 + i) for i in range(10)]
    table = grocery_table(tmp_path, [*test, *rows, *test])
    assert script("fetch_groceries").write(table, tmp_path / "out") == 10
    data = load(str(tmp_path / "out"), BUNDLED_FORMAT, strict=True)
    assert data.notes == ()
    assert Counter(data.train.labels.tolist()) == {0: 18, 1: 14}
    assert Counter(data.validation.labels.tolist()) == {0: 4, 1: 4}
    assert len(data.test) == 10
    written = {p.relative_to(tmp_path / "out"): p.read_bytes() for p in tmp_path.rglob("*.jpg")}
    assert sorted(written.values()) == sorted(raw(s) for _, _, s in [*rows, *test])
    assert {p.name for p in written if p.parts[0] == "test"} == {f"{i:04}.jpg" for i in range(10)}
    script("fetch_groceries").write(table, tmp_path / "again")
    again = {p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*.jpg")}
    assert again == set(written)


def test_the_colour_model_does_with_a_photo_what_the_bundled_one_does_with_its_grey_copy(
    tmp_path, monkeypatch, capsys
):
    call(monkeypatch, script("colour_vit"), tmp_path / "colour")
    format = image_format(str(tmp_path / "colour"))
    assert (format.size, format.channels) == (32, 3)
    grain = np.random.RandomState(0)
    for name in "ab" * 6:
        (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
        pixels = grain.randint(0, 256, (32, 32, 3), dtype=np.uint8)
        count = len(list((tmp_path / "data" / name).iterdir()))
        Image.fromarray(pixels).save(tmp_path / "data" / name / f"{count}.png")
    outputs = []
    for source in (str(tmp_path / "colour"), "bundled"):
        model, format = load_model(source, 2)
        data = load(str(tmp_path / "data"), format)
        with torch.no_grad():
            outputs.append(model(data.train.batch(torch.arange(len(data.train)))[0]).logits)
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0)  # grey is rounded to 8 bits
    assert outputs[0].std() > 0.1
    with pytest.raises(SystemExit):
        call(monkeypatch, script("colour_vit"), tmp_path / "colour")
    assert "exists; choose a new folder" in capsys.readouterr().err


# --- training on them


@pytest.mark.slow
@pytest.mark.skipif(
    not FASHION_MNIST_FOLDER.is_dir(),
    reason=f"no Fashion-MNIST in {FASHION_MNIST_FOLDER} (apt: dataset-fashion-mnist)",
)
def test_a_fresh_head_learns_fashion_mnist(tmp_path):
    """docs/results.md has the accuracy over seeds; the bundled ViT was pretrained on these data."""
    options = ("--data", "fashion-mnist", "--limit", 1000, "--method", "shaped-lr", "--epochs", 2)
    before, *_, after = finetune(tmp_path / "run", *options)
    assert before["accuracy"] < 0.2
    assert after["epoch"] == 2
    assert after["test"] > 0.75


@pytest.mark.slow
@pytest.mark.skipif(
    "FLOPS_GROCERIES" not in os.environ, reason="scripts/fetch_groceries.py fetches them"
)
def test_grocery_photos(tmp_path, monkeypatch):
    """docs/results.md has the accuracy over seeds; the largest class is 10 % of the test photos."""
    call(monkeypatch, script("colour_vit"), tmp_path / "colour")
    folder = os.environ["FLOPS_GROCERIES"]
    data = load(folder, image_format(str(tmp_path / "colour")), strict=True)
    assert len(data.classes) == 14
    assert [len(getattr(data, name)) for name in SPLITS] == [586, 146, 661]
    options = ("--data", folder, "--model", tmp_path / "colour", "--queries", 8, "--batch", 16)
    before, *_, after = finetune(tmp_path / "run", *options, "--epochs", 5)
    assert before["accuracy"] < 0.15
    assert after["test"] > 0.16
