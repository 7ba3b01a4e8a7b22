"""The vision task: the bundled model, its data, and the script that made the model."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import flops
from flops.optional import install_command
from flops.tasks.classification import accuracy, bundled_vit, digits, logits
from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD, Split, hold_out_split
from flops.tasks.data.fashion_mnist import (
    _IDX_FILES,
    FASHION_MNIST_FOLDER,
    _read_idx,
    fashion_mnist,
)

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

ASSET = Path(flops.__file__).parent / "tasks" / "assets" / "tiny-vit"
SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_vit.py"
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = (f"{name}-ubyte.gz" for name in _IDX_FILES)
PARTS = ("train", "validation", "test")


def parts(splits):
    return [getattr(splits, part) for part in PARTS]


def global_random_state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def run(*command):
    """Run Python in a process of its own, with the package under test importable."""
    source = str(Path(flops.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture
def tiny_folder(tmp_path):
    """48 training and 20 test images in the format of Fashion-MNIST; image i starts with byte i."""
    folder = tmp_path / "tiny-fashion-mnist"
    folder.mkdir()
    noise = np.random.RandomState(0)
    for images_name, labels_name, n in (
        (TRAIN_IMAGES, TRAIN_LABELS, 48),
        (TEST_IMAGES, TEST_LABELS, 20),
    ):
        images = noise.randint(0, 256, (n, 28, 28))
        images[:, 0, 0] = np.arange(n)
        images[:, 0, 1] = 255
        write_idx(folder / images_name, images)
        write_idx(folder / labels_name, np.arange(n) % 4)
    return folder


# ---- the bundled model


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
    result = run("-c", code)
    assert result.stdout.strip() == "set()", result.stderr


def test_the_preprocessor_agrees_with_the_data(tiny_folder):
    from PIL import Image
    from transformers import AutoImageProcessor

    preprocessor = json.loads((ASSET / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert preprocessor["image_mean"] == [IMAGE_MEAN]
    assert preprocessor["image_std"] == [IMAGE_STD]
    split = fashion_mnist(tiny_folder).test
    raw = _read_idx(tiny_folder / TEST_IMAGES)
    images = [Image.fromarray(np.pad(image.numpy(), 2)) for image in raw]
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


# ---- the digits


def test_digits_have_the_stated_sizes():
    data = digits()
    assert [len(split) for split in parts(data)] == [1197, 300, 300]
    for split in parts(data):
        assert split.images.shape == (len(split), 1, 32, 32)
        assert split.images.dtype == torch.float32
        assert split.labels.shape == (len(split),)
        assert split.labels.dtype == torch.int64
    pixels = torch.cat([split.images for split in parts(data)])
    assert (pixels.min(), pixels.max()) == (-1, 1)  # [0, 1] under mean and std 0.5


def test_digit_splits_are_disjoint_and_cover_the_data():
    # the 1,797 images are all different, so different images are different points
    images = torch.cat([split.images for split in parts(digits(size=8))]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 1797


def test_digits_keep_each_image_with_its_label():
    from sklearn.datasets import load_digits

    data = load_digits()
    label_of = {
        image.tobytes(): label for image, label in zip(data.images, data.target, strict=True)
    }
    for split in parts(digits(size=8)):
        originals = ((split.images * 0.5 + 0.5) * 16).round().double().squeeze(1).numpy()
        assert [label_of[image.tobytes()] for image in originals] == split.labels.tolist()


def test_digit_splits_are_stratified():
    data = digits()
    counts = torch.stack([torch.bincount(split.labels, minlength=10) for split in parts(data)])
    for row, size in zip(counts, (1197, 300, 300), strict=True):
        assert row.sum() == size
        assert (row - counts.sum(0) * size / 1797).abs().max() < 2


def test_digit_splits_are_shuffled():
    for split in parts(digits()):
        labels = split.labels
        assert (labels[1:] == labels[:-1]).float().mean() < 0.25  # 0.1 if independent; sorted: ~1


def test_digits_never_change():
    torch.manual_seed(3)
    np.random.seed(3)
    data = digits()
    again = digits()
    for split, other in zip(parts(data), parts(again), strict=True):
        assert torch.equal(split.images, other.images)
        assert torch.equal(split.labels, other.labels)
    # written down: published accuracies refer to these splits
    assert data.train.labels[:10].tolist() == [1, 0, 3, 1, 6, 7, 7, 1, 2, 3]
    assert data.validation.labels[:10].tolist() == [9, 2, 7, 8, 1, 6, 3, 0, 4, 1]
    assert data.test.labels[:10].tolist() == [5, 2, 6, 8, 7, 4, 9, 1, 0, 6]


@pytest.mark.parametrize("size", [8, 16, 28])
def test_digits_come_in_other_sizes(size):
    assert digits(size=size).test.images.shape == (300, 1, size, size)


@pytest.mark.parametrize("size", [7, 0, -1])
def test_digits_are_not_shrunk(size):
    with pytest.raises(ValueError, match=f"at least 8.*got {size}"):
        digits(size=size)


def test_splits_are_frozen():
    data = digits(size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train = data.test
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.train.labels = data.test.labels


@pytest.mark.parametrize(("n", "size"), [(1, 0), (7, 0), (7, 7), (12, 1), (101, 50), (60, 59)])
def test_holding_out_is_exact_disjoint_and_stratified(n, size):
    labels = torch.arange(n) % 3
    rest, held = hold_out_split(Split(torch.arange(n), labels), size)
    assert len(held) == size
    assert sorted([*rest.images.tolist(), *held.images.tolist()]) == list(range(n))
    for split in (rest, held):
        assert torch.equal(split.labels, split.images % 3)
        share = torch.bincount(labels, minlength=3) * len(split) / n
        assert (torch.bincount(split.labels, minlength=3) - share).abs().max() <= 1


# ---- Fashion-MNIST files


def test_fashion_mnist_is_read_padded_and_normalised(tiny_folder):
    data = fashion_mnist(tiny_folder)
    assert [len(split) for split in parts(data)] == [44, 4, 20]
    for split in parts(data):
        assert split.images.shape == (len(split), 1, 32, 32)
        border = torch.ones(32, 32, dtype=torch.bool)
        border[2:-2, 2:-2] = False
        assert (split.images[:, 0, border] == -1).all()
        assert (split.images[:, 0, 2, 3] == 1).all()  # the byte 255
        index = ((split.images[:, 0, 2, 2] * 0.5 + 0.5) * 255).round().long()
        assert torch.equal(split.labels, index % 4)
    assert data.validation.labels.sort().values.tolist() == [0, 1, 2, 3]
    assert data.test.labels.tolist() == [0, 1, 2, 3] * 5  # the test set keeps its order


def test_fashion_mnist_takes_a_folder_as_text(tiny_folder):
    assert len(fashion_mnist(str(tiny_folder)).test) == 20


def test_missing_files_are_named_with_the_remedy(tiny_folder):
    (tiny_folder / TEST_LABELS).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        fashion_mnist(tiny_folder)
    message = str(caught.value)
    assert str(tiny_folder) in message
    assert TEST_LABELS in message
    assert TRAIN_IMAGES not in message
    assert "Debian package dataset-fashion-mnist" in message
    assert "four idx .gz files" in message


def gzipped(*values):
    return gzip.compress(bytes(values), mtime=0)  # the time would make the test's name change


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"plain text", "not a complete gzip file"),
        (gzipped(*[7] * 1000)[:-9], "not a complete gzip file"),
        (gzipped(*range(200))[:10] + b"\xff" * 50, "not a complete gzip file"),
        (gzipped(), "not a complete idx file"),
        (gzipped(0, 0, 8), "not a complete idx file"),
        (gzipped(0, 0, 8, 0), "not a complete idx file"),
        (gzipped(0, 0, 13, 1, 0, 0, 0, 1, 5), "not a complete idx file"),  # type 13: floats
        (gzipped(0, 0, 8, 3, 0, 0), "not a complete idx file"),  # ends inside the sizes
        (gzipped(0, 0, 8, 1, 0, 0, 0, 3, 1, 2), "not a complete idx file"),
        (gzipped(0, 0, 8, 1, 0, 0, 0, 1, 1, 2), "not a complete idx file"),
    ],
    ids=range(10),
)
def test_a_damaged_file_is_named(tiny_folder, content, problem):
    path = tiny_folder / TRAIN_LABELS
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        fashion_mnist(tiny_folder)
    assert str(path) in str(caught.value)


def test_files_that_do_not_belong_together_are_refused(tiny_folder):
    write_idx(tiny_folder / TEST_LABELS, np.zeros(19))
    with pytest.raises(ValueError, match=r"\[20, 28, 28\] and \[19\]"):
        fashion_mnist(tiny_folder)
    write_idx(tiny_folder / TEST_IMAGES, np.zeros((19, 32, 32)))
    with pytest.raises(ValueError, match=r"N images of 28x28.*\[19, 32, 32\]"):
        fashion_mnist(tiny_folder)


# ---- logits and accuracy


class Answers(nn.Module):
    """Predicts class `image[0]` and returns the logits in one of several wrappings."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.wrap, self.sizes = wrap, []
        self.inner = nn.Dropout(0.9)

    def forward(self, images):
        assert torch.is_inference_mode_enabled()
        self.sizes.append(len(images))
        return self.wrap(self.inner(nn.functional.one_hot(images[:, 0].long(), 4).float()))


def model_output(logits):
    from transformers.modeling_outputs import ImageClassifierOutput

    return ImageClassifierOutput(logits=logits)


WRAPPINGS = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits,),
    "tuple with loss": lambda logits: (torch.tensor(1.0), logits),
    "tuple with losses": lambda logits: (torch.ones(len(logits)), logits),
    "object": lambda logits: SimpleNamespace(logits=logits),
    "ModelOutput": model_output,
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_logits_are_found_in_every_wrapping(wrap):
    expected = torch.arange(6.0).view(2, 3)
    assert logits(wrap(expected)) is expected


@pytest.mark.parametrize("outputs", [None, 3.0, (), (torch.ones(2),), SimpleNamespace(logits=1)])
def test_missing_logits_are_explained(outputs):
    with pytest.raises(TypeError, match=f"no logits in a {type(outputs).__name__}.*must return"):
        logits(outputs)


SEVEN = Split(
    images=torch.tensor([0.0, 1, 2, 3, 0, 1, 2]).unsqueeze(1),
    labels=torch.tensor([0, 1, 2, 3, 1, 2, 3]),  # the first four are as predicted
)


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
@pytest.mark.parametrize(("batch", "sizes"), [(3, [3, 3, 1]), (7, [7]), (256, [7])])
def test_accuracy_counts_every_point_once(wrap, batch, sizes):
    model = Answers(wrap)
    assert accuracy(model, SEVEN, batch) == 4 / 7
    assert model.sizes == sizes


def test_accuracy_restores_training_flags_also_after_an_error():
    model = nn.Sequential(Answers(), nn.Dropout(0.9))  # dropout would spoil the answers
    model[1].eval()
    flags = [module.training for module in model.modules()]
    assert accuracy(model, SEVEN) == 4 / 7
    assert [module.training for module in model.modules()] == flags
    model[0].wrap = lambda logits: "nonsense"
    with pytest.raises(TypeError):
        accuracy(model[0], SEVEN)
    assert [module.training for module in model.modules()] == flags


def test_accuracy_refuses_what_it_cannot_measure():
    with pytest.raises(ValueError, match="got 0 and"):
        accuracy(Answers(), SEVEN.take(slice(0)))
    with pytest.raises(ValueError, match="batch=0"):
        accuracy(Answers(), SEVEN, 0)


# ---- the pretraining script


@pytest.mark.slow
def test_the_script_gives_the_same_weights_again(tiny_folder, tmp_path):
    outs = [tmp_path / "first", tmp_path / "second", tmp_path / "other-seed"]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        result = run(
            *("-W", "error", SCRIPT, "--data", tiny_folder, "--out", out),
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
    result = run(SCRIPT, "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "dataset-fashion-mnist" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
