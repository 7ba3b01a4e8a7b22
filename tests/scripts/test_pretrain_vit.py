"""The script that made the bundled ViT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flops
from tests.support.idx_files import tiny_fashion_mnist
from tests.support.launching import python

ASSET = Path(flops.__file__).parent / "tasks" / "assets" / "tiny-vit"
SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_vit.py"


@pytest.mark.slow
def test_the_script_gives_the_same_weights_again(tmp_path):
    data = tiny_fashion_mnist(tmp_path / "data")
    outs = [tmp_path / "first", tmp_path / "second", tmp_path / "other-seed"]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        result = python(
            *("-W", "error", SCRIPT, "--data", data, "--out", out),
            *("--epochs", 2, "--batch", 16, "--limit", 40, "--seed", seed),
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert re.search(r"epoch 2/2: loss [\d.]+, validation accuracy [\d.]+%", result.stdout)
        assert "\x1b" not in result.stdout  # no bar when the output is not a terminal
    assert {file.name for file in outs[0].iterdir()} == {file.name for file in ASSET.iterdir()}
    first, second, other = ((out / "model.safetensors").read_bytes() for out in outs)
    assert first == second
    assert first != other
    card = (outs[0] / "README.md").read_text(encoding="utf-8")
    assert "pretrain_vit.py --epochs 2 --batch 16 --limit 40\n" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_the_script_explains_missing_data(tmp_path):
    result = python(SCRIPT, "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "dataset-fashion-mnist" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
