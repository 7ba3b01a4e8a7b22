"""The embedded images of Fashion-MNIST: what they are, and the shift."""

from __future__ import annotations

import importlib.resources

import torch

from flops.tasks.data.fashion import CLASSES, GREY, HAZE, fashion_shots, shifted

ASSET = importlib.resources.files("flops.tasks") / "assets" / "fashion" / "shots.npz"


def test_sizes_types_and_classes() -> None:
    shots = fashion_shots()
    for split, each in ((shots.train, 16), (shots.validation, 16), (shots.test, 100)):
        assert split.pixels.shape == (10 * each, 28, 28)
        assert split.pixels.dtype == torch.uint8
        assert split.labels.dtype == torch.int64
        assert len(split) == 10 * each
        assert torch.bincount(split.labels).tolist() == [each] * 10
    assert shots.classes == CLASSES
    assert len(set(CLASSES)) == 10


def test_no_image_is_in_two_splits_or_twice() -> None:
    shots = fashion_shots(shift=False)
    images = torch.cat([s.pixels for s in (shots.train, shots.validation, shots.test)])
    assert len(torch.unique(images, dim=0)) == len(images) == 1320


def test_the_shift_is_haze_of_every_split() -> None:
    plain, hazy = fashion_shots(shift=False), fashion_shots()
    for name in ("train", "validation", "test"):
        before, after = getattr(plain, name), getattr(hazy, name)
        assert torch.equal(before.labels, after.labels)
        exact = before.pixels.double() * (1 - HAZE / 100) + HAZE / 100 * GREY
        assert (after.pixels.double() - exact).abs().max() <= 0.5
        assert torch.equal(after.pixels, shifted(before.pixels))
    assert plain.train.pixels.min() == 0
    assert hazy.train.pixels.min() == HAZE * GREY // 100


def test_the_shift_loses_no_order_of_pixels() -> None:
    levels = shifted(torch.arange(256, dtype=torch.uint8)).int()
    assert (levels.diff() >= 0).all()
    assert len(levels.unique()) > 130


def test_size_and_licence_of_the_asset() -> None:
    assert len(ASSET.read_bytes()) < 1_000_000
    card = importlib.resources.files("flops.tasks") / "assets" / "fashion" / "README.md"
    assert "MIT License" in card.read_text(encoding="utf-8")
