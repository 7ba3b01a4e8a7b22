"""Pixels of an image: modes, size, orientation, normalisation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from flops.tasks.data.images import ImageFormat, load
from flops.tasks.data.pixels import decode
from tests.support.pictures import GREY, RGB, make_folder, shades


def test_grey_becomes_rgb_and_is_normalised_channel_by_channel(tmp_path):
    make_folder(tmp_path, {"a": 20}, start=100)
    data = load(str(tmp_path), RGB)
    pixels, _ = data.train.batch(torch.tensor([0]))
    shade = shades(load(str(tmp_path), GREY).train)[0] / 255
    expected = [(shade - m) / s for m, s in zip(RGB.mean, RGB.std, strict=True)]
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-5)


def test_rgb_becomes_grey():
    image = Image.new("RGB", (8, 8), (10, 200, 60))
    found = decode(image, GREY)
    assert found.shape == (1, 8, 8)
    assert found[0, 0, 0] == round(0.299 * 10 + 0.587 * 200 + 0.114 * 60)
    assert decode(image, RGB)[:, 0, 0].tolist() == [10, 200, 60]


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK", "I;16", "I"])
@pytest.mark.parametrize("format", [GREY, RGB])
def test_every_mode_is_read(tmp_path, mode, format):
    values = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8)
    image = Image.fromarray(values)
    if mode.startswith("I"):
        image = Image.fromarray(values.astype(np.uint16) * 257)
    if mode != "I;16":
        image = image.convert(mode)
    suffix = "tif" if mode in ("CMYK", "I") else "png"
    image.save(tmp_path / f"x.{suffix}", **({"transparency": b"\0\1"} if mode == "P" else {}))
    with warnings.catch_warnings(), Image.open(tmp_path / f"x.{suffix}") as stored:
        warnings.simplefilter("error")
        found = decode(stored, format)
    assert found.shape == (format.channels, 8, 8)
    if mode != "1":
        assert np.abs(found - values.astype(int)).max() <= 1


def test_images_of_floats_are_read_by_their_range():
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    for scale in (1, 255):
        found = decode(Image.fromarray(scale * values), GREY)
        assert np.abs(found - 255 * values).max() <= 1
    for bad in (-0.1, 300.0, float("nan")):
        with pytest.raises(ValueError, match="needs values in"):
            decode(Image.fromarray(np.full((8, 8), bad, np.float32)), GREY)


def test_long_images_are_cut_to_the_centre():
    values = np.zeros((20, 60), np.uint8)
    values[:, 20:40] = 255  # the centred square
    for array in (values, values.T):
        found = decode(Image.fromarray(array), GREY)[0]
        found = found if array is values else found.T
        assert (found[:, 1:-1] == 255).all()
        assert (found[:, [0, -1]] > 200).all()  # smoothed with what lies beside it


def test_resizing_is_bilinear_with_smoothing_and_as_resize_then_crop():
    values = np.random.RandomState(0).randint(0, 256, (40, 60), dtype=np.uint8)
    image = Image.fromarray(values)
    small = image.resize((12, 8), Image.Resampling.BILINEAR).crop((2, 0, 10, 8))
    assert np.abs(decode(image, GREY)[0] - np.asarray(small, int)).max() <= 2
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    assert np.abs(decode(Image.fromarray(stripes), GREY)[0] - 127.5).max() < 20


def test_photos_are_turned_upright(tmp_path):
    values = np.zeros((8, 8), np.uint8)
    values[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees
    Image.fromarray(values).save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as image:
        found = decode(image, GREY)[0]
    assert (found[:, -1] == 255).all()
    assert not found[:, :-1].any()


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 1, (0.5,), (0.5,)),
        (8, 2, (0.5,) * 2, (0.5,) * 2),
        (8, 3, (0.5,), (0.5,)),
        (8, 1, (0.5,), (0.0,)),
    ],
)
def test_formats_that_no_image_has(wrong):
    with pytest.raises(ValueError, match="need"):
        ImageFormat(*wrong)
