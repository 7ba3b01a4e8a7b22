"""Runs the model in batches of a fixed size, so that an answer does not depend on its batch.

Matrix products round differently for different numbers of rows, so a prompt that is encoded in a
batch of 3 may differ in the last bit from the same prompt in a batch of 30. Here every batch is
padded to one size, and `deviation` measures whether a row's features then are bitwise equal at
every position and with any neighbours; the size is halved until they are. A nondeterministic model,
whose rows differ even in batches of one, is served with the measured `tolerance`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from cachetools import LRUCache
from torch import Tensor

from flops.errors import FlopsError
from flops.serve.batch_invariance import deviation
from flops.serve.cache import FeatureCache
from flops.serve.schema import Encodings, ScoreRequest

log = logging.getLogger("flops.serve")


class PromptedModel(Protocol):
    """A frozen model of images and class texts with prompts, such as `PromptedClip`."""

    classes: tuple[str, ...]
    text_width: int
    image_width: int
    text_limit: int

    @property
    def channels(self) -> int:
        """Channels of an image."""

    @property
    def image_size(self) -> int:
        """Side of an image."""

    def digest(self) -> str:
        """Identifies this model with its classes."""

    def prepare(self, pixels: Tensor) -> Tensor:
        """uint8 (N, H, W[, C]) to float32 (N, channels, S, S)."""

    def text_features(self, prompts: Tensor) -> Tensor:
        """(P, m_T, text_width) to (P, C, E)."""

    def image_features(self, images: Tensor, prompts: Tensor) -> Tensor:
        """(Q, channels, S, S) and (Q, m_I, image_width) to (Q, E)."""

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """(Q, E) and (Q, C, E) to (Q, C)."""


@dataclass(frozen=True, eq=False)
class ParsedRequest:
    """A validated request, its encodings, and the pixels of its points."""

    request: ScoreRequest
    encodings: Encodings
    pixels: Tensor  # (N, H, W[, C])


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Encodings of at most one batch."""

    keys: list[Any]
    slots: Tensor  # destination of its features
    prompts: Tensor
    size: int  # of the batch


@dataclass(eq=False)
class Scorer:
    """Logits of many requests at once; not thread-safe.

    Args:
        model: The frozen model.
        text_batch: Text prompts per batch.
        image_batch: Images per batch.
        memory: Bytes of each of the three caches (text and image features, prepared images).
    """

    model: PromptedModel
    text_batch: int = 8
    image_batch: int = 32
    memory: int = 64 * 2**20
    batches: int = field(default=0, init=False)
    used: int = field(default=0, init=False)  # rows of batches without padding
    padded: int = field(default=0, init=False)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict, init=False)
    deviations: dict[tuple[str, int], float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode():
            text = self.model.text_features(torch.zeros(1, 0, self.model.text_width))[0]  # (C, E)
        if not bool(torch.isfinite(text).all()):
            raise FlopsError("the model's features are not finite: its weights are damaged")
        self._texts = FeatureCache(self._slots(text.numel(), 4096), text.shape)
        self._images = FeatureCache(self._slots(text.shape[1], 16384), text.shape[1:])
        pixels = self.model.channels * self.model.image_size**2
        room = max(1, self.memory // (4 * pixels))
        self._prepared: LRUCache[tuple[str, int], Tensor] = LRUCache(room)
        self.size("logits", 0)
        for tokens in (0, 4):
            self.size("text", tokens)
            self.size("image", tokens)

    @property
    def most_texts(self) -> int:
        """Largest number of distinct text prompts at once."""
        return len(self._texts.rows)

    @property
    def most_images(self) -> int:
        """Largest number of distinct (point, image prompt) pairs at once."""
        return len(self._images.rows)

    @property
    def tolerance(self) -> float:
        """Largest measured difference of a feature or logit between batches; 0 is bitwise.

        Measured at startup for 0 and 4 prompt tokens, for other numbers at their first use.
        """
        return max(self.deviations.values())

    @property
    def cache(self) -> dict[str, int]:
        """Cache hits and misses of the features."""
        texts, images = self._texts, self._images
        return {
            "text_hits": texts.hits,
            "text_misses": texts.misses,
            "image_hits": images.hits,
            "image_misses": images.misses,
        }

    @torch.inference_mode()
    def score(self, tasks: Sequence[ParsedRequest]) -> list[Tensor]:
        """Logits (Q, C) of each task."""
        try:
            text_slots = self._encode_texts(tasks)
            image_slots = self._encode_images(tasks)
        except BaseException:
            self._texts.clear()
            self._images.clear()
            raise
        text, image = torch.tensor(text_slots), torch.tensor(image_slots)
        size, found = self.size("logits", 0), []
        for begin in range(0, len(text), size):
            chosen = slice(begin, begin + size)
            rows = _padded(self._images.rows[image[chosen]], size)
            found.append(self.model.logits(rows, _padded(self._texts.rows[text[chosen]], size)))
        counts = [task.encodings.cost.queries for task in tasks]
        return [part.clone() for part in torch.cat(found)[: len(text)].split(counts)]

    def size(self, kind: str, tokens: int) -> int:
        """Fixed batch size for a kind of input and number of prompt tokens; measured once."""
        if (kind, tokens) not in self.sizes:
            wanted = self.text_batch if kind == "text" else self.image_batch
            function, rows = self._case(kind, tokens, 2 * wanted)
            size = wanted
            with torch.inference_mode():
                while (found := deviation(function, rows, size)) and size > 1:
                    size //= 2
            if size != wanted:
                log.warning(
                    "%s with %d prompt tokens: results depend on the other rows in batches of %d; "
                    "using batches of %d, which is slower",
                    *(kind, tokens, wanted, size),
                )
            if found:
                log.warning(
                    "%s with %d prompt tokens: the same row differs by up to %.1e between repeats; "
                    "/v1/info reports it as batch_tolerance",
                    *(kind, tokens, found),
                )
            self.deviations[kind, tokens] = found
            self.sizes[kind, tokens] = size
        return self.sizes[kind, tokens]

    def _case(
        self, kind: str, tokens: int, rows: int
    ) -> tuple[Callable[..., Tensor], list[Tensor]]:
        """A function of batches and random rows for it."""
        model, source = self.model, torch.Generator().manual_seed(8)

        def draw(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, generator=source)

        if kind == "text":
            return model.text_features, [0.1 * draw(tokens, model.text_width)]
        if kind == "image":
            images = draw(model.channels, model.image_size, model.image_size)
            return model.image_features, [images, 0.1 * draw(tokens, model.image_width)]
        classes, width = self._texts.rows.shape[1:]
        return model.logits, [draw(width), draw(classes, width)]

    def _encode_texts(self, tasks: Sequence[ParsedRequest]) -> list[int]:
        slots, missing = self._texts.claim(key for task in tasks for key in task.encodings.texts)
        if missing:
            prompts = [task.request.text for task in tasks]
            names = ((task.encodings.texts, task.request.text_of) for task in tasks)
            for part in self._chunks("text", missing, prompts, names):
                rows = self.model.text_features(_padded(part.prompts, part.size))
                self._texts.rows[part.slots] = rows[: len(part.slots)]
        return slots

    def _encode_images(self, tasks: Sequence[ParsedRequest]) -> list[int]:
        slots, missing = self._images.claim(key for task in tasks for key in task.encodings.images)
        if missing:
            pixels = {task.request.points: task.pixels for task in tasks}
            prompts = [task.request.image for task in tasks]
            names = ((task.encodings.images, task.request.image_of) for task in tasks)
            for part in self._chunks("image", missing, prompts, names):
                images = torch.stack([self._image(key, pixels[key[0]]) for key in part.keys])
                rows = self.model.image_features(
                    _padded(images, part.size), _padded(part.prompts, part.size)
                )
                self._images.rows[part.slots] = rows[: len(part.slots)]
        return slots

    def _chunks(
        self,
        kind: str,
        missing: dict[Any, int],
        prompts: Sequence[Tensor],
        names: Iterable[tuple[list[Any], Tensor]],
    ) -> Iterator[_Chunk]:
        """Missing encodings in chunks of at most one batch, with equally many prompt tokens.

        Args:
            kind: text or image.
            missing: Slots by key.
            prompts: Prompts of each request.
            names: Keys of all rows of each request, and the prompt of each row.
        """
        places: dict[int, dict[Any, int]] = {}  # by tokens: key -> index among these prompts
        lengths: dict[int, int] = {}
        for given, (keys, of) in zip(prompts, names, strict=True):
            tokens = given.shape[1]
            start, found = lengths.get(tokens, 0), places.setdefault(tokens, {})
            found.update(
                (key, start + i) for key, i in zip(keys, of.tolist(), strict=True) if key in missing
            )
            lengths[tokens] = start + len(given)
        for tokens in sorted(places):
            every = torch.cat([given for given in prompts if given.shape[1] == tokens])
            keys, size = list(places[tokens]), self.size(kind, tokens)
            for begin in range(0, len(keys), size):
                chunk = keys[begin : begin + size]
                self.batches += 1
                self.used += len(chunk)
                self.padded += size - len(chunk)
                chosen = torch.tensor([places[tokens][key] for key in chunk])
                slots = torch.tensor([missing[key] for key in chunk])
                yield _Chunk(chunk, slots, every[chosen], size)

    def _image(self, key: tuple[str, int, bytes], pixels: Tensor) -> Tensor:
        """A preprocessed image; preprocessed alone, so that it does not depend on others."""
        name = key[:2]
        found = self._prepared.get(name)
        if found is None:
            found = self._prepared[name] = self.model.prepare(pixels[key[1] : key[1] + 1])[0]
        return found

    def _slots(self, width: int, most: int) -> int:
        return max(1, min(most, self.memory // (4 * width)))


def _padded(rows: Tensor, size: int) -> Tensor:
    """Pad with zeros to a full batch."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
