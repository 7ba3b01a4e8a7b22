"""Answers do not depend on what they are batched with, to the last bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.serve.batch_invariance import deviation
from flops.serve.cache import FeatureCache
from flops.serve.schema import Encodings, ScoreRequest
from flops.serve.scorer import ParsedRequest, Scorer
from flops.tasks.models.clip import PromptedClip
from tests.support.serving import Server, pixels, query


@pytest.fixture(scope="module")
def model() -> PromptedClip:
    return PromptedClip.load()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("batching")) as running:
        yield running


def task(seed: int, rows: int, tokens: int = 4) -> ParsedRequest:
    asked = vars(query("points", "-", rows, seed, tokens))
    request = ScoreRequest(**{name: value for name, value in asked.items() if name != "key"})
    return ParsedRequest(request, Encodings.of(request, 10), pixels())


def expected(model: PromptedClip, asked: ParsedRequest) -> Tensor:
    request = asked.request
    with torch.inference_mode():
        text = model.text_features(request.text)[request.text_of]
        images = model.prepare(asked.pixels)[request.rows]
        return model.logits(model.image_features(images, request.image[request.image_of]), text)


@pytest.mark.bits
def test_a_crowd_changes_no_bit(server) -> None:
    """Each request alone, on a service of its own state, and among 47 others at the same time."""
    with server.client(concurrency=48) as client:
        name = client.upload(pixels())
        asked = [(i, 1 + i % 7, i % 3 * 2) for i in range(48)]
        alone = [
            client.score(**vars(query(name, f"alone-{i}", rows, i, tokens))).logits
            for i, rows, tokens in asked[:6]
        ]
        crowd = [query(name, f"crowd-{i}", rows, i, tokens) for i, rows, tokens in asked]
        with ThreadPoolExecutor(48) as pool:
            together = [scores.logits for scores in pool.map(client.send, crowd)]
        alone += [
            client.score(**vars(query(name, f"alone-{i}", rows, i, tokens))).logits
            for i, rows, tokens in asked[6:]
        ]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_scores_are_those_of_the_model(model) -> None:
    scorer = Scorer(model)
    tasks = [task(1, 5), task(2, 40), task(3, 7, tokens=0), task(4, 3, tokens=2)]
    for found, asked in zip(scorer.score(tasks), tasks, strict=True):
        torch.testing.assert_close(found, expected(model, asked), atol=1e-4, rtol=1e-4)


@pytest.mark.bits
def test_no_bit_depends_on_order_company_or_caches(model) -> None:
    alone = [Scorer(model).score([task(seed, 5)])[0] for seed in range(6)]
    scorer = Scorer(model)
    together = scorer.score([task(seed, 5) for seed in range(6)])
    backwards = Scorer(model).score([task(seed, 5) for seed in reversed(range(6))])[::-1]
    cached = scorer.score([task(seed, 5) for seed in range(6)])
    assert scorer.cache["text_hits"] >= 30
    for others in (together, backwards, cached):
        assert all(torch.equal(a, b) for a, b in zip(alone, others, strict=True))


def test_shared_prompts_are_encoded_once(model) -> None:
    scorer = Scorer(model)
    asked = task(1, 30)
    request = ScoreRequest(
        "points",
        asked.request.rows,
        asked.request.text[:1],
        torch.zeros(30, dtype=torch.int64),
        asked.request.image[:1],
        torch.zeros(30, dtype=torch.int64),
    )
    encodings = Encodings.of(request, 10)
    scorer.score([ParsedRequest(request, encodings, pixels())])
    different = len(set(request.rows.tolist()))
    assert (encodings.cost.texts, encodings.cost.images) == (10, different)
    assert scorer.cache["text_misses"] == 1
    assert scorer.cache["image_misses"] == different
    assert scorer.batches == 2


def test_caches_are_bounded_and_forget_the_oldest(model) -> None:
    scorer = Scorer(model, memory=64 * 4 * 10 * 8)  # 8 text prompts of 10 classes
    assert scorer.most_texts == 8
    first = scorer.score([task(1, 8)])[0]
    for seed in range(2, 5):
        scorer.score([task(seed, 8)])
    misses = scorer.cache["text_misses"]
    assert torch.equal(scorer.score([task(1, 8)])[0], first)
    assert scorer.cache["text_misses"] == misses + 8


def test_slab_keeps_what_was_used_last() -> None:
    cache = FeatureCache(3, [2])
    assert cache.claim(iter("abc"))[1] == {"a": 0, "b": 1, "c": 2}
    cache.claim(iter("a"))
    slots, missing = cache.claim(iter("dad"))
    assert missing == {"d": 1}
    assert slots == [1, 0, 1]


class Leaking:
    """A model whose text features depend on other rows as soon as more than `most` are there."""

    def __init__(self, model: PromptedClip, most: int) -> None:
        self._model, self._most = model, most

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def text_features(self, prompts: Tensor) -> Tensor:
        found = self._model.text_features(prompts)
        return found + 1e-7 * prompts.sum() if len(prompts) > self._most else found


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.bits
def test_batches_shrink_until_neighbours_do_not_matter(most, model, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        scorer = Scorer(Leaking(model, most), text_batch=8)
    assert scorer.sizes["text", 4] <= most
    assert scorer.sizes["image", 4] == Scorer(model).sizes["image", 4]
    assert "using batches of" in caplog.text
    alone = Scorer(Leaking(model, most)).score([task(1, 5)])[0]
    assert torch.equal(scorer.score([task(2, 9), task(1, 5)])[1], alone)


class Sized:
    """A model that rounds as the size of the batch wants it, as matrix products may."""

    def __init__(self, model: PromptedClip) -> None:
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def text_features(self, prompts: Tensor) -> Tensor:
        return self._model.text_features(prompts) * (1 + 1e-6 * len(prompts))

    def image_features(self, images: Tensor, prompts: Tensor) -> Tensor:
        return self._model.image_features(images, prompts) * (1 + 1e-6 * len(prompts))

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        return self._model.logits(image, text) * (1 + 1e-6 * len(image))


@pytest.mark.bits
def test_rounding_that_depends_on_the_size_of_a_batch_does_not_show(model) -> None:
    alone = [Scorer(Sized(model)).score([task(seed, 5)])[0] for seed in range(8)]
    together = Scorer(Sized(model)).score([task(seed, 5) for seed in range(8)])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.bits
def test_deviation_sees_positions_and_neighbours() -> None:
    rows = [torch.randn(16, 5)]
    assert deviation(lambda x: x.exp(), rows, 8) == 0
    assert deviation(lambda x: x + torch.arange(len(x)).unsqueeze(1) * 1e-3, rows, 8) > 1e-3
    assert deviation(lambda x: x + x.roll(1, 0) * 1e-3, rows, 8) > 1e-4
    assert deviation(lambda x: x + x.mean() * 1e-3, rows, 8) > 1e-5
    assert deviation(lambda x: x + (x.abs().max() > 1e6), rows, 8) >= 1
    assert deviation(lambda x: x / (x.abs().max() < 1e6), rows, 8) == float("inf")


class Drifting:
    """A model that never gives the same bits twice."""

    def __init__(self, model: PromptedClip) -> None:
        self._model, self._calls = model, 0

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def image_features(self, images: Tensor, prompts: Tensor) -> Tensor:
        self._calls += 1
        return self._model.image_features(images, prompts) + 1e-5 * (self._calls % 7)


def test_what_cannot_be_removed_is_measured_and_told(model, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        scorer = Scorer(Drifting(model))
    assert scorer.sizes["image", 4] == 1
    assert 1e-6 < scorer.tolerance < 1e-4
    assert "batch_tolerance" in caplog.text
    assert Scorer(model).tolerance == 0


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_depends_on_place_or_company_with_threads(threads, model) -> None:
    """In fixed shapes, whatever the kernel and the number of threads: sizes shrink if need be."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scorer, small = (Scorer(model, 4, 8, memory=2**14) for _ in "ab")  # caches of 4 texts
        assert scorer.tolerance == 0
        alone = [small.score([task(seed, 2, tokens=4)])[0] for seed in range(3)]
        asked = [task(seed, 2, tokens=4) for seed in (2, 1, 0)]
        together = [*scorer.score(asked[:2]), *scorer.score(asked[2:])][::-1]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_weights_that_are_not_finite_are_refused() -> None:
    broken = PromptedClip.load()
    broken.model.text_projection.weight[0, 0] = float("nan")
    with pytest.raises(FlopsError, match="weights are damaged"):
        Scorer(broken)


def test_an_error_of_the_model_leaves_nothing_half_done(model, monkeypatch) -> None:
    scorer = Scorer(model)
    good = scorer.score([task(1, 5)])[0]
    with monkeypatch.context() as patch:
        patch.setattr(model, "image_features", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.score([task(2, 5)])
    assert torch.equal(scorer.score([task(2, 5)])[0], Scorer(model).score([task(2, 5)])[0])
    assert torch.equal(scorer.score([task(1, 5)])[0], good)
