"""The script that chose the embedded images: they are what the data set holds."""

from __future__ import annotations

import importlib.resources
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_STD
from flops.tasks.data.fashion import fashion_shots
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_shots.py"
ASSET = importlib.resources.files("flops.tasks") / "assets" / "fashion" / "shots.npz"


@pytest.mark.slow
def test_the_script_makes_the_asset_from_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FASHION_MNIST_FOLDER.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    with np.load(tmp_path / "shots.npz") as made, ASSET.open("rb") as file, np.load(file) as kept:
        assert sorted(made.files) == sorted(kept.files) == ["test", "train", "validation"]
        assert all(np.array_equal(made[name], kept[name]) for name in made.files)
    # an image of each class is where its label says
    data, shots = fashion_mnist(), fashion_shots(shift=False)
    for label in range(10):
        known = data.test.images[data.test.labels == label][:, 0, 2:-2, 2:-2]
        known = ((known * IMAGE_STD + IMAGE_MEAN) * 255).round().to(torch.uint8)
        mine = shots.test.pixels[shots.test.labels == label]
        assert torch.equal(mine, known[:100])


def test_a_missing_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--data", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert "dataset-fashion-mnist" in capsys.readouterr().err
