"""Training on real images: Fashion-MNIST and photos of groceries."""

from __future__ import annotations

import json
import os

import pytest

from flops.cli.main import main
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER
from flops.tasks.data.images import load
from flops.tasks.models.vit import image_format
from tests.support.scripts import call_script
from tests.support.splits import SPLITS


def finetune(folder, *arguments):
    """Run the command; return its evaluations: the first is before training."""
    main(["finetune", "--test", "--output", str(folder), *map(str, arguments)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"]


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
    call_script(monkeypatch, "colour_vit", tmp_path / "colour")
    folder = os.environ["FLOPS_GROCERIES"]
    data = load(folder, image_format(str(tmp_path / "colour")), strict=True)
    assert len(data.classes) == 14
    assert [len(getattr(data, name)) for name in SPLITS] == [586, 146, 661]
    options = ("--data", folder, "--model", tmp_path / "colour", "--queries", 8, "--batch", 16)
    before, *_, after = finetune(tmp_path / "run", *options, "--epochs", 5)
    assert before["accuracy"] < 0.15
    assert after["test"] > 0.28
