"""The bundled ViT: what it is, its fresh head, and that loading it disturbs nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flops
from flops.optional import install_command
from flops.tasks.classification import accuracy, bundled_vit, digits
from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist
from tests.support.idx_files import TEST_IMAGES, read_images, tiny_fashion_mnist
from tests.support.launching import python
from tests.support.random_state import global_random_state
from tests.support.splits import parts

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

ASSET = Path(flops.__file__).parent / "tasks" / "assets" / "tiny-vit"


def test_the_asset_is_small_and_complete():
    names = {file.name for file in ASSET.iterdir()}
    assert names == {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"}
    assert sum(file.stat().st_size for file in ASSET.iterdir()) <= 2_000_000


def test_the_asset_names_no_folder_of_its_maker():
    for name in ("config.json", "preprocessor_config.json", "README.md"):
        text = (ASSET / name).read_text(encoding="utf-8")
        assert not re.search(r"/(home|work|root|tmp|Users)/", text)


def test_the_model_is_as_documented():
    model = bundled_vit()
    assert not any(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 305_994
    assert f"{parameters:,} parameters" in (ASSET / "README.md").read_text(encoding="utf-8")
    with torch.no_grad():
        images = torch.zeros(3, 1, IMAGE_SIZE, IMAGE_SIZE)
        outputs = model(images, output_hidden_states=True)
    assert outputs.logits.shape == (3, 10)
    assert [h.shape for h in outputs.hidden_states] == [(3, 17, 64)] * 7


@pytest.mark.parametrize("classes", [1, 2, 10, 37])
def test_the_head_has_the_size_asked_for(classes):
    model = bundled_vit(classes)
    assert model.classifier.weight.shape == (classes, 64)
    assert model.num_labels == model.config.num_labels == classes
    assert model.config.id2label == {i: f"LABEL_{i}" for i in range(classes)}


def test_the_fresh_head_depends_on_the_seed_alone():
    torch.manual_seed(1)
    first = bundled_vit(seed=5).state_dict()
    torch.manual_seed(2)
    again = bundled_vit(seed=5).state_dict()
    other = bundled_vit(seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert changed == {"classifier.weight"}


def test_the_fresh_head_is_small_gaussian_noise():
    head = bundled_vit(2000).classifier  # 128,000 draws: 5 standard errors are 1 % of 0.02
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(head.weight.mean().item()) < 5 * 0.02 / 128_000**0.5
    assert torch.equal(head.bias, torch.zeros(2000))


def test_the_pretrained_head_is_kept_on_request():
    kept, fresh = bundled_vit(pretrained_head=True), bundled_vit()
    assert kept.config.id2label[9] == "Ankle boot"
    assert not torch.equal(kept.classifier.weight, fresh.classifier.weight)
    assert torch.equal(kept.vit.layernorm.weight, fresh.vit.layernorm.weight)


@pytest.mark.parametrize("pretrained_head", [False, True])
def test_loading_leaves_the_process_as_it_was(pretrained_head, capfd):
    from transformers.utils import logging

    before, bars = global_random_state(), logging.is_progress_bar_enabled()
    bundled_vit(pretrained_head=pretrained_head)
    digits()
    assert global_random_state() == before
    assert logging.is_progress_bar_enabled() == bars
    assert capfd.readouterr() == ("", "")


def test_loading_ignores_the_default_device_and_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model = bundled_vit()
            images = digits().test.images
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    assert (images.dtype, images.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize(
    ("classes", "pretrained_head"), [(0, False), (-3, False), (5, True), (0, True)]
)
def test_impossible_heads_are_refused(classes, pretrained_head):
    with pytest.raises(ValueError, match=f"classes must be.*got {classes}"):
        bundled_vit(classes, pretrained_head=pretrained_head)


def test_a_missing_dependency_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    hint = re.escape(install_command("vision"))
    with pytest.raises(ImportError, match=f"needs transformers.*{hint}"):
        bundled_vit()
    with pytest.raises(ImportError, match=f"needs sklearn.*{hint}"):
        digits()


def test_importing_the_task_imports_no_optional_dependency():
    code = "import sys, flops.tasks.classification as t; "
    code += "print({'transformers', 'sklearn'} & set(sys.modules))"
    result = python("-c", code)
    assert result.stdout.strip() == "set()", result.stderr


def test_the_preprocessor_agrees_with_the_data(tmp_path):
    from PIL import Image
    from transformers import AutoImageProcessor

    preprocessor = json.loads((ASSET / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert preprocessor["image_mean"] == [IMAGE_MEAN]
    assert preprocessor["image_std"] == [IMAGE_STD]
    folder = tiny_fashion_mnist(tmp_path / "data")
    split = fashion_mnist(folder).test
    images = [Image.fromarray(np.pad(image, 2)) for image in read_images(folder / TEST_IMAGES)]
    outputs = AutoImageProcessor.from_pretrained(ASSET)(images, return_tensors="pt")
    torch.testing.assert_close(outputs["pixel_values"], split.images, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not FASHION_MNIST_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_the_pretrained_model_has_the_accuracy_its_card_states():
    data = fashion_mnist()
    assert [len(split) for split in parts(data)] == [55_000, 5_000, 10_000]
    card = (ASSET / "README.md").read_text(encoding="utf-8")
    stated = {
        name: float(percent) / 100
        for name, percent in re.findall(r"^\| (validation|test) .*\| ([\d.]+)%", card, re.MULTILINE)
    }
    model = bundled_vit(pretrained_head=True)
    for name in ("validation", "test"):
        measured = accuracy(model, getattr(data, name))
        assert measured >= 0.89
        # another machine's kernels may round a few points across a boundary
        assert measured == pytest.approx(stated[name], abs=0.001)
