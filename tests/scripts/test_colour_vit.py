"""The script that gives the bundled ViT three channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from flops.tasks.data.images import load
from flops.tasks.models.vit import image_format, load_model
from tests.support.scripts import call_script


def test_the_colour_model_does_with_a_photo_what_the_bundled_one_does_with_its_grey_copy(
    tmp_path, monkeypatch, capsys
):
    call_script(monkeypatch, "colour_vit", tmp_path / "colour")
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
        call_script(monkeypatch, "colour_vit", tmp_path / "colour")
    assert "exists; choose a new folder" in capsys.readouterr().err
