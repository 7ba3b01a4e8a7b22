"""The script that made the bundled CLIP."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_STD
from flops.tasks.data.fashion import CLASSES, fashion_shots
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist
from flops.tasks.models.clip import PromptedClip

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_clip.py"


@pytest.mark.slow
def test_the_script_makes_a_clip_from_images_that_are_no_shots(tmp_path: Path) -> None:
    if not FASHION_MNIST_FOLDER.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    options = ["--epochs", "1", "--limit", "300", "--skip-test", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(SCRIPT), *options], check=True, capture_output=True)
    made = PromptedClip.load(tmp_path, CLASSES)
    assert made.text_features(torch.zeros(1, 4, 64)).isfinite().all()
    assert "--limit 300 --skip-test" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_script_leaves_the_shots_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if not FASHION_MNIST_FOLDER.is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("pretrain_clip")
    data, shots = fashion_mnist(), fashion_shots(shift=False)
    for split, taken in ((data.train, shots.train), (data.validation, shots.validation)):
        kept = script.without_shots(split, None)
        pixels = (script.crop(kept.images)[:, 0] * IMAGE_STD + IMAGE_MEAN) * 255
        seen = {image.tobytes() for image in pixels.round().to(torch.uint8).numpy()}
        assert len(kept) == len(split) - 160
        assert not any(image.tobytes() in seen for image in taken.pixels.numpy())
