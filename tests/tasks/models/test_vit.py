"""Models by name or path: heads that fit, formats, pieces, and errors that say what works."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from flops.tasks.classification import bundled_vit
from flops.tasks.data.images import BUNDLED_FORMAT, ImageFormat
from flops.tasks.models import vit
from flops.tasks.models.vit import image_format, load_model, parts, random_vit
from flops.tasks.models.weights import warn_of_other_classes, weights_digest
from tests.support.random_state import global_random_state

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}


@pytest.fixture
def saved(tmp_path):
    """A tiny random ViT with five classes, as save_pretrained writes it."""
    config = transformers.ViTConfig(**TINY, num_labels=5)
    config.id2label = dict(enumerate("abcde"))
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def test_the_bundled_model_is_that_of_the_vision_task():
    model, format = load_model(classes=7, seed=3)
    assert format == BUNDLED_FORMAT == ImageFormat(32, 1, (0.5,), (0.5,)) == image_format()
    for found, expected in zip(
        model.state_dict().values(),
        bundled_vit(7, seed=3).state_dict().values(),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_a_saved_model_keeps_its_body_and_gets_a_new_head(saved, capfd):
    path, original = saved
    state = global_random_state()
    model, format = load_model(str(path), 3, seed=1)
    assert global_random_state() == state
    assert capfd.readouterr().err == ""
    assert format == ImageFormat(16, 3, (0.5,) * 3, (0.5,) * 3)
    for name, value in original.vit.state_dict().items():
        assert torch.equal(model.vit.state_dict()[name], value)
    assert model.classifier.weight.shape == (3, 16)
    assert (model.num_labels, model.config.num_labels) == (3, 3)
    assert model.config.id2label[0] == "LABEL_0"
    assert not any(module.training for module in model.modules())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    pixels = torch.randn(2, 3, 16, 16)
    body = original.vit(pixels).last_hidden_state[:, 0]
    torch.testing.assert_close(model(pixels).logits, model.classifier(body))


def test_the_seed_draws_the_head(saved):
    heads = [load_model(str(saved[0]), 500, seed=s)[0].classifier for s in (0, 0, 1)]
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not heads[0].bias.any()


def test_half_precision_weights_become_float32(saved, tmp_path):
    saved[1].half().save_pretrained(tmp_path / "half")
    model, _ = load_model(str(tmp_path / "half"), 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_without_a_head_gets_one(saved, tmp_path):
    saved[1].vit.save_pretrained(tmp_path / "headless")
    model, _ = load_model(str(tmp_path / "headless"), 4, seed=2)
    again, _ = load_model(str(tmp_path / "headless"), 4, seed=2)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_kept_head_is_the_models_own(saved, tmp_path):
    path, original = saved
    model, _ = load_model(str(path), 5, head="kept", seed=1)
    for name, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.config.id2label[0] == "a"
    bundled, _ = load_model(head="kept")
    expected = bundled_vit(pretrained_head=True)
    assert torch.equal(bundled.classifier.weight, expected.classifier.weight)
    original.vit.save_pretrained(tmp_path / "headless")
    for source, classes, reason in (
        (str(path), 3, "has 5 classes, the data 3"),
        ("bundled", 3, "has 10 classes, the data 3"),
        ("random:vit-base", 10, "no head to keep"),
        (str(tmp_path / "headless"), 2, "has no classification head to keep"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_model(source, classes, head="kept")


def test_weights_that_do_not_fit_are_refused(saved):
    path, _ = saved
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"do not fit its configuration, such as vit\.layers\.2"):
        load_model(str(path), 3)
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises((ValueError, RuntimeError), match=r"fit|mismatch"):
        load_model(str(path), 3)


@pytest.mark.parametrize(
    ("preprocessor", "mean", "std"),
    [
        (
            {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.1, 0.2, 0.3]},
            (0.4, 0.5, 0.6),
            (0.1, 0.2, 0.3),
        ),
        ({"image_mean": 0.3, "image_std": [0.2]}, (0.3,) * 3, (0.2,) * 3),
        ({"image_mean": [9] * 3, "image_std": [9] * 3, "do_normalize": False}, (0,) * 3, (1,) * 3),
        (
            {"rescale_factor": 1 / 127.5, "image_mean": [1], "image_std": [1]},
            (0.5,) * 3,
            (0.5,) * 3,
        ),
        ({"do_rescale": False, "image_mean": [127.5], "image_std": [255]}, (0.5,) * 3, (1,) * 3),
        (
            {"size": {"shortest_edge": 20}, "rescale_factor": 0.00392156862745098},
            (0.5,) * 3,
            (0.5,) * 3,
        ),
    ],
)
def test_the_normalisation_is_the_preprocessors(saved, preprocessor, mean, std):
    (saved[0] / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    _, format = load_model(str(saved[0]), 3)
    assert (format.size, format.channels) == (16, 3)
    assert format.mean == pytest.approx(mean)
    assert format.std == pytest.approx(std)
    assert image_format(str(saved[0])) == format


def test_the_format_is_what_transformers_does_itself(saved):
    processor = transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.4, 0.5, 0.6], image_std=[0.1, 0.2, 0.3]
    )
    processor.save_pretrained(saved[0])
    pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8)
    expected = processor(pixels.numpy(), return_tensors="pt")["pixel_values"]
    found = image_format(str(saved[0])).prepare(pixels.permute(2, 0, 1)[None])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_grey_model_with_the_usual_preprocessor(tmp_path):
    config = transformers.ViTConfig(**TINY, num_channels=1)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    usual = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(usual))
    assert image_format(str(tmp_path)) == ImageFormat(16, 1, (0.5,), (0.5,))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6]}')
    with pytest.raises(ValueError, match="for each of 1 channels"):
        image_format(str(tmp_path))


def test_images_that_are_not_square_are_refused(tmp_path):
    config = transformers.ViTConfig(**TINY | {"image_size": [16, 24]})
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="need a model of square images"):
        image_format(str(tmp_path))


def test_vit_base_with_random_weights():
    state = global_random_state()
    model, format = load_model("random:vit-base", 5, seed=1)
    assert global_random_state() == state
    assert format == ImageFormat(224, 3, (0.5,) * 3, (0.5,) * 3) == image_format("random:vit-base")
    assert sum(p.numel() for p in model.parameters()) == 85_798_656 + 5 * 769
    assert len(parts(model).layers) == 12
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_random_weights_come_from_the_seed(monkeypatch):
    monkeypatch.setitem(vit.PRESETS, "tiny", TINY)
    first, again, other = (random_vit("tiny", 3, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    query = "vit.layers.0.attention.q_proj.weight"
    assert not torch.equal(first[query], other[query])


def test_vit_large_has_the_papers_size():
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(vit._random_config("vit-large"))
    assert len(parts(model).layers) == 24
    assert sum(p.numel() for p in model.vit.parameters()) == 303_301_632


def test_parts_of_the_bundled_model_are_all_of_it():
    model = bundled_vit()
    found = parts(model)
    assert found.embeddings is model.vit.embeddings
    assert found.head is model.classifier
    assert found.norm is model.vit.layernorm
    pieces = [found.embeddings, *found.layers, found.norm, found.head]
    assert {p for piece in pieces for p in piece.parameters()} == set(model.parameters())


@pytest.mark.parametrize("kind", ["DeiT", "Dinov2"])
def test_relatives_of_vit_work(tmp_path, kind):
    options = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    config = getattr(transformers, f"{kind}Config")(**options)
    getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(tmp_path)
    model, format = load_model(str(tmp_path), 6)
    assert len(parts(model).layers) == 2
    assert model(torch.randn(2, 3, format.size, format.size)).logits.shape == (2, 6)


def test_other_models_are_refused(tmp_path):
    config = transformers.ConvNextV2Config(hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"is not a vision transformer .*no layers"):
        parts(transformers.ConvNextV2ForImageClassification(config))
    with pytest.raises(ValueError, match=r"a Linear is not a vision transformer .*no embeddings"):
        parts(nn.Linear(2, 2))
    config = transformers.ResNetConfig(hidden_sizes=[4, 4], depths=[1, 1], embedding_size=4)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    with pytest.raises(ValueError, match="does not load as an image classifier"):
        load_model(str(tmp_path / "resnet"), 3)
    bert = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="does not load as an image classifier"):
        load_model(str(tmp_path / "bert"), 3)


def test_models_that_are_not_there(tmp_path, monkeypatch):
    for name in ("nonsense", "./nowhere", "/no/where"):
        with pytest.raises(
            FileNotFoundError, match=r"no model .*'bundled', 'random:vit-base'.*path"
        ):
            load_model(name, 3)
    with pytest.raises(OSError, match=r"no model in .*save_pretrained"):
        load_model(str(tmp_path), 3)
    with pytest.raises(ValueError, match=r"no preset 'vit-huge'.*vit-base, vit-large"):
        load_model("random:vit-huge", 3)
    with pytest.raises(ValueError, match="classes must be >= 1, got 0"):
        load_model("bundled", 0)

    def refuse(*args, **options):
        raise OSError("We couldn't connect\nto anything")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(
        OSError, match=r"'google/vit' on the Hugging Face hub \(We couldn't connect\)"
    ):
        load_model("google/vit", 3)


def test_the_digest_of_a_folder_follows_its_contents(saved):
    path, model = saved
    before = weights_digest(str(path))
    assert before == weights_digest(str(path)) != ""
    with torch.no_grad():
        model.classifier.bias += 1
    model.save_pretrained(path)
    assert weights_digest(str(path)) != before
    assert {weights_digest(name) for name in ("bundled", "random:vit-base", "owner/name", "")} == {
        ""
    }


def test_a_kept_head_of_other_classes_is_noticed(saved):
    model, _ = load_model(str(saved[0]), 5, head="kept")
    warn_of_other_classes(model, tuple("abcde"))
    with pytest.warns(UserWarning, match=r"has the classes a, b, c, d, e.* have e, d, c"):
        warn_of_other_classes(model, tuple("edcba"))
    fresh, _ = load_model(str(saved[0]), 5)
    warn_of_other_classes(fresh, tuple("vwxyz"))  # which has no names
