"""A CLIP with prompts equals plain transformers, row by row, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flops.errors import FlopsError
from flops.tasks.data.fashion import CLASSES, fashion_shots
from flops.tasks.models.clip import ClipError, PromptedClip
from tests.support.clips import ANIMALS

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["bundled", "random"])
def clip(request: pytest.FixtureRequest, bundled: PromptedClip, folder: Path) -> PromptedClip:
    return bundled if request.param == "bundled" else PromptedClip.load(folder, ANIMALS)


def tokens_of(clip: PromptedClip) -> list[Tensor]:
    """The class texts' tokens, one by one, from the model's own tokenizer."""
    source = clip.model.config._name_or_path
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = [f"a photo of a {name}." for name in clip.classes]
    inner = tokenizer(texts, add_special_tokens=False).input_ids
    return [torch.tensor([start, *ids, end]) for ids in inner]


def one_by_one(clip: PromptedClip, prefix: Tensor) -> Tensor:
    """Encode [BOS, prefix, class text, EOS] of each class alone, with an ordinary causal mask."""
    encoder, rows = clip.model.text_model, []
    for tokens in tokens_of(clip):
        words = encoder.embeddings.token_embedding(tokens)
        states = encoder.embeddings(inputs_embeds=torch.cat([words[:1], prefix, words[1:]])[None])
        length = states.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        states = encoder.encoder(states, attention_mask=mask).last_hidden_state
        last = encoder.final_layer_norm(states[:, -1])
        rows.append(F.normalize(clip.model.text_projection(last), dim=-1))
    return torch.cat(rows)


def test_texts_without_prompts_are_those_of_plain_clip(clip: PromptedClip) -> None:
    mine = clip.text_features(torch.zeros(2, 0, clip.text_width))
    rows = [clip.model.get_text_features(ids[None]).pooler_output for ids in tokens_of(clip)]
    plain = F.normalize(torch.cat(rows), dim=-1)
    assert mine.shape == (2, len(clip.classes), clip.model.config.projection_dim)
    for row in mine:
        torch.testing.assert_close(row, plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 4, 12])
@pytest.mark.bits
def test_packed_texts_equal_texts_one_by_one(clip: PromptedClip, count: int) -> None:
    prompts = torch.randn(3, count, clip.text_width)
    mine = clip.text_features(prompts)
    for row, prefix in zip(mine, prompts, strict=True):
        torch.testing.assert_close(row, one_by_one(clip, prefix), atol=1e-6, rtol=0)
    assert (mine[0] - mine[1]).abs().max() > 1e-3  # the prefix matters


@pytest.mark.bits
def test_gradients_of_packed_texts_equal_those_one_by_one(clip: PromptedClip) -> None:
    prompts = torch.randn(1, 3, clip.text_width, requires_grad=True)
    weights = torch.randn(len(clip.classes), clip.model.config.projection_dim)
    (mine,) = torch.autograd.grad((clip.text_features(prompts)[0] * weights).sum(), prompts)
    (plain,) = torch.autograd.grad((one_by_one(clip, prompts[0]) * weights).sum(), prompts)
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
    assert (mine.abs().amax(-1) > 1e-4).all()  # every prompt vector has some


def images_of(clip: PromptedClip, count: int) -> Tensor:
    shape = (count, clip.image_size, clip.image_size, clip.channels)
    return clip.prepare(torch.randint(0, 256, shape, dtype=torch.uint8))


def test_images_without_prompts_are_those_of_plain_clip(clip: PromptedClip) -> None:
    images = images_of(clip, 5)
    mine = clip.image_features(images, torch.zeros(5, 0, clip.image_width))
    plain = clip.model.get_image_features(images).pooler_output
    torch.testing.assert_close(mine, F.normalize(plain, dim=-1), atol=1e-6, rtol=0)


def test_image_prompts_are_a_suffix_without_positions(clip: PromptedClip) -> None:
    images = images_of(clip, 3)
    prompts = torch.randn(3, 4, clip.image_width, requires_grad=True)
    mine = clip.image_features(images, prompts)
    encoder, parts = clip.model.vision_model, clip.model.vision_model.embeddings
    for row, image, prompt in zip(mine, images, prompts, strict=True):
        patches = parts.patch_embedding(image[None]).flatten(2).transpose(1, 2)[0]
        placed = torch.cat([parts.class_embedding[None], patches]) + parts.position_embedding.weight
        states = encoder.pre_layrnorm(torch.cat([placed, prompt])[None])
        for layer in encoder.encoder.layers:
            states = layer(states, None)
        first = clip.model.visual_projection(encoder.post_layernorm(states[0, 0]))
        torch.testing.assert_close(row, F.normalize(first, dim=-1), atol=1e-6, rtol=0)
    (slope,) = torch.autograd.grad((mine * torch.randn_like(mine)).sum(), prompts)
    assert (slope.abs().amax(-1) > 1e-5).all()


def test_logits_are_those_of_plain_clip(clip: PromptedClip) -> None:
    images = images_of(clip, 4)
    text = clip.text_features(torch.zeros(1, 0, clip.text_width)).expand(4, -1, -1)
    image = clip.image_features(images, torch.zeros(4, 0, clip.image_width))
    rows = [
        clip.model(input_ids=ids[None], pixel_values=images).logits_per_image
        for ids in tokens_of(clip)
    ]
    torch.testing.assert_close(clip.logits(image, text), torch.cat(rows, 1), atol=1e-4, rtol=0)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("threads", "texts", "images"),
    [
        (2, 16, 32),
        (1, 5, 7),
        pytest.param(1, 16, 32, marks=pytest.mark.slow),
        pytest.param(2, 5, 7, marks=pytest.mark.slow),
    ],
)
def test_a_row_depends_on_place_and_neighbours_by_rounding_at_most(
    clip: PromptedClip, threads: int, texts: int, images: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prefix = torch.randn(2 * texts, 12, clip.text_width)
        suffix, pixels = torch.randn(2 * images, 10, clip.image_width), images_of(clip, 2 * images)
        with torch.inference_mode():
            seen: list[Any] = []
            for _ in range(3):
                order, rows = torch.randperm(2 * texts), torch.randperm(2 * images)
                text = torch.cat([clip.text_features(prefix[i]) for i in order.split(texts)])
                found = [clip.image_features(pixels[i], suffix[i]) for i in rows.split(images)]
                image = torch.cat(found)
                logits = clip.logits(image[: len(text)], text[: len(image)])
                assert logits.isfinite().all()
                seen.append((text[order.argsort()], image[rows.argsort()]))
    finally:
        torch.set_num_threads(before)
    for text, image in seen[1:]:
        torch.testing.assert_close(text, seen[0][0], atol=2e-6, rtol=0)
        torch.testing.assert_close(image, seen[0][1], atol=2e-6, rtol=0)


@pytest.mark.bits
def test_logits_depend_on_their_row_only() -> None:
    clip = PromptedClip.load()
    image, text = torch.randn(64, 64), torch.randn(64, 10, 64)
    whole, order = clip.logits(image, text), torch.randperm(64)
    alone = [clip.logits(image[i : i + 1], text[i : i + 1]) for i in range(64)]
    close = {"atol": 1e-5 * float(whole.abs().max()), "rtol": 0}
    torch.testing.assert_close(clip.logits(image[order], text[order]), whole[order], **close)
    torch.testing.assert_close(torch.cat(alone), whole, **close)


def test_prepare_normalises_crops_resizes_and_serves_grey_images(folder: Path) -> None:
    clip = PromptedClip.load(folder, ANIMALS)
    pixels = torch.randint(0, 256, (2, 12, 12, 3), dtype=torch.uint8)
    exact = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(clip.prepare(pixels), exact)
    wide = torch.cat([torch.zeros_like(pixels[:, :, :3]), pixels, pixels[:, :, :3]], dim=2)
    torch.testing.assert_close(clip.prepare(wide), exact)
    white = clip.prepare(torch.full((2, 40, 30), 255, dtype=torch.uint8))
    torch.testing.assert_close(white, torch.ones(2, 3, 12, 12))
    grey = clip.prepare(pixels[..., 0])
    assert grey.shape == (2, 3, 12, 12)
    torch.testing.assert_close(grey, exact[:, :1].expand(-1, 3, -1, -1))


def accuracy(clip: PromptedClip, shift: bool) -> float:
    split = fashion_shots(shift).validation
    text = clip.text_features(torch.zeros(1, 0, clip.text_width)).expand(len(split), -1, -1)
    image = clip.image_features(
        clip.prepare(split.pixels), torch.zeros(len(split), 0, clip.image_width)
    )
    return float((clip.logits(image, text).argmax(1) == split.labels).float().mean())


def test_the_bundled_clip_knows_garments_but_not_in_haze(bundled: PromptedClip) -> None:
    assert bundled.classes == CLASSES
    assert (bundled.channels, bundled.image_size) == (1, 28)
    assert (bundled.text_width, bundled.image_width) == (64, 64)
    assert bundled.text_limit >= 12
    assert accuracy(bundled, shift=False) > 0.85
    assert 0.4 < accuracy(bundled, shift=True) < 0.6


@pytest.mark.slow
def test_prompts_undo_the_haze_by_backpropagation(bundled: PromptedClip) -> None:
    split = fashion_shots().train
    images = bundled.prepare(split.pixels)
    basis = torch.randn(2, 50, 4 * 64) * torch.tensor([0.02, 0.3]).view(2, 1, 1) / 50**0.5
    z = torch.randn(2, 1, 50, requires_grad=True)
    optimizer = torch.optim.Adam([z], 0.2)
    for _ in range(60):
        text, image = (z @ basis).view(2, 1, 4, 64)
        rows = bundled.image_features(images, image.expand(len(split), -1, -1))
        texts = bundled.text_features(text).expand(len(split), -1, -1)
        logits = bundled.logits(rows, texts)
        optimizer.zero_grad()
        F.cross_entropy(logits, split.labels).backward()
        optimizer.step()
    assert (logits.argmax(1) == split.labels).float().mean() > 0.6
    assert all(parameter.grad is None for parameter in bundled.model.parameters())


def test_prompts_and_images_that_do_not_fit_are_refused(bundled: PromptedClip) -> None:
    assert issubclass(ClipError, FlopsError)
    limit = bundled.text_limit
    assert bundled.text_features(torch.zeros(1, limit, 64)).isfinite().all()
    with pytest.raises(ClipError, match=f"leaves room for {limit}"):
        bundled.text_features(torch.zeros(1, limit + 1, 64))
    with pytest.raises(ClipError, match=r"text prompts of float32, \(rows, vectors, 64\)"):
        bundled.text_features(torch.zeros(1, 4, 32))
    with pytest.raises(ClipError, match="image prompts of float32"):
        bundled.image_features(torch.zeros(1, 1, 28, 28), torch.zeros(1, 4, 64).double())
    with pytest.raises(ClipError, match="for each prompt"):
        bundled.image_features(torch.zeros(2, 1, 28, 28), torch.zeros(1, 4, 64))
    with pytest.raises(ClipError, match="need pixels of uint8"):
        bundled.prepare(torch.zeros(1, 28, 28))
    with pytest.raises(ClipError, match="images of 1 channels, got 3"):
        bundled.prepare(torch.zeros(1, 28, 28, 3, dtype=torch.uint8))
