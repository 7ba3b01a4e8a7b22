"""The model's work: rows in batches of a fixed size, so that an answer never depends on neighbours.

Matrix products round differently for different numbers of rows, so a prompt that is encoded in a
batch of 3 may differ in the last bit from the same prompt in a batch of 30. Here every batch is
padded to one size, and `steady` checks that a row's features are then bitwise the same at every
position and beside any others; sizes are halved until they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flops.blackbox.requests import ScoreRequest, Units

log = logging.getLogger("flops.serve")


class Prompted(Protocol):
    """A frozen model of images and class texts that takes prompts, as `PromptedClip` is."""

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
        """What tells this model with its classes from others."""

    def prepare(self, pixels: Tensor) -> Tensor:
        """uint8 (N, H, W[, C]) to float32 (N, channels, S, S)."""

    def text_features(self, prompts: Tensor) -> Tensor:
        """(P, m_T, text_width) to (P, C, E)."""

    def image_features(self, images: Tensor, prompts: Tensor) -> Tensor:
        """(Q, channels, S, S) and (Q, m_I, image_width) to (Q, E)."""

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """(Q, E) and (Q, C, E) to (Q, C)."""


@dataclass(frozen=True, eq=False)
class Task:
    """A request with its units and the pixels of its points."""

    request: ScoreRequest
    units: Units
    pixels: Tensor  # (N, H, W[, C])


class Slab:
    """Rows of features by key; the least recently used make room."""

    def __init__(self, slots: int, shape: Sequence[int]) -> None:
        self.rows = torch.empty(slots, *shape)
        self.hits = self.misses = 0
        self._slots: OrderedDict[Hashable, int] = OrderedDict()

    def claim(self, keys: Iterator[Hashable]) -> tuple[list[int], dict[Any, int]]:
        """Slot of every key, and the keys whose slots are still to be filled.

        No more distinct keys than slots, or the first lose theirs.
        """
        slots, missing = [], {}
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                self.hits += 1
            else:
                full = len(self._slots) == len(self.rows)
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                self._slots[key] = missing[key] = slot
                self.misses += 1
            slots.append(slot)
        return slots, missing

    def clear(self) -> None:
        """Forget everything, for instance slots that were not filled because of an error."""
        self._slots.clear()


@dataclass(eq=False)
class Scorer:
    """Logits of many requests at once; to be used by one thread.

    Args:
        model: The frozen model.
        text_batch: Text prompts per batch.
        image_batch: Images per batch.
        memory: Bytes of each of the three caches (text and image features, prepared images).
    """

    model: Prompted
    text_batch: int = 8
    image_batch: int = 32
    memory: int = 64 * 2**20
    batches: int = field(default=0, init=False)
    used: int = field(default=0, init=False)  # rows of batches that were not padding
    padded: int = field(default=0, init=False)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode():
            text = self.model.text_features(torch.zeros(1, 0, self.model.text_width))[0]  # (C, E)
        self._texts = Slab(self._slots(text.numel(), 4096), text.shape)
        self._images = Slab(self._slots(text.shape[1], 16384), text.shape[1:])
        pixels = self.model.channels * self.model.image_size**2
        self._most_prepared = max(1, self.memory // (4 * pixels))
        self._prepared: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self.size("logits", 0)
        for tokens in (0, 4):
            self.size("text", tokens)
            self.size("image", tokens)

    @property
    def most_texts(self) -> int:
        """Most distinct text prompts at once."""
        return len(self._texts.rows)

    @property
    def most_images(self) -> int:
        """Most distinct pairs of a point and an image prompt at once."""
        return len(self._images.rows)

    @property
    def cache(self) -> dict[str, int]:
        """Hits and misses of the features."""
        texts, images = self._texts, self._images
        return {
            "text_hits": texts.hits,
            "text_misses": texts.misses,
            "image_hits": images.hits,
            "image_misses": images.misses,
        }

    @torch.inference_mode()
    def score(self, tasks: Sequence[Task]) -> list[Tensor]:
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
        counts = [task.units.cost.queries for task in tasks]
        return [part.clone() for part in torch.cat(found)[: len(text)].split(counts)]

    def size(self, kind: str, tokens: int) -> int:
        """Fixed batch size for a kind of batch with this many prompt tokens; checked once."""
        if (kind, tokens) not in self.sizes:
            wanted = self.text_batch if kind == "text" else self.image_batch
            function, rows = self._case(kind, tokens, 2 * wanted)
            with torch.inference_mode():
                size = wanted
                while size > 1 and not steady(function, rows, size):
                    size //= 2
            if size != wanted:
                log.warning(
                    "%s with %d prompt tokens: answers depend on neighbours in batches of %d; "
                    "using batches of %d, which is slower",
                    *(kind, tokens, wanted, size),
                )
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

    def _encode_texts(self, tasks: Sequence[Task]) -> list[int]:
        slots, missing = self._texts.claim(key for task in tasks for key in task.units.texts)
        if missing:
            prompts = {
                key: task.request.text[i]
                for task in tasks
                for key, i in zip(task.units.texts, task.request.text_of.tolist(), strict=True)
                if key in missing
            }
            for keys, size in self._chunks("text", {key: len(prompts[key]) for key in missing}):
                rows = self.model.text_features(
                    _padded(torch.stack([prompts[k] for k in keys]), size)
                )
                self._texts.rows[[missing[key] for key in keys]] = rows[: len(keys)]
        return slots

    def _encode_images(self, tasks: Sequence[Task]) -> list[int]:
        slots, missing = self._images.claim(key for task in tasks for key in task.units.images)
        if missing:
            where = {
                key: (task, i)
                for task in tasks
                for key, i in zip(task.units.images, task.request.image_of.tolist(), strict=True)
                if key in missing
            }
            tokens = {key: where[key][0].request.image.shape[1] for key in missing}
            for keys, size in self._chunks("image", tokens):
                images = torch.stack([self._image(key, where[key][0].pixels) for key in keys])
                prompts = torch.stack([where[key][0].request.image[where[key][1]] for key in keys])
                rows = self.model.image_features(_padded(images, size), _padded(prompts, size))
                self._images.rows[[missing[key] for key in keys]] = rows[: len(keys)]
        return slots

    def _chunks(self, kind: str, tokens: dict[Any, int]) -> Iterator[tuple[list[Any], int]]:
        """Keys of equally many prompt tokens, at most a batch at a time."""
        for count in sorted(set(tokens.values())):
            keys, size = [key for key in tokens if tokens[key] == count], self.size(kind, count)
            for begin in range(0, len(keys), size):
                chunk = keys[begin : begin + size]
                self.batches += 1
                self.used += len(chunk)
                self.padded += size - len(chunk)
                yield chunk, size

    def _image(self, key: tuple[str, int, bytes], pixels: Tensor) -> Tensor:
        """A prepared image; prepared alone, so that it never depends on others."""
        name = key[:2]
        found = self._prepared.get(name)
        if found is None:
            found = self._prepared[name] = self.model.prepare(pixels[key[1] : key[1] + 1])[0]
            if len(self._prepared) > self._most_prepared:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(name)
        return found

    def _slots(self, width: int, most: int) -> int:
        return max(1, min(most, self.memory // (4 * width)))


def steady(function: Callable[..., Tensor], rows: Sequence[Tensor], size: int) -> bool:
    """Whether a row's result is bitwise the same at every position and with other neighbours.

    Args:
        function: Of one or more batches, row by row.
        rows: Its arguments, with twice as many rows as the largest size.
        size: Rows of a batch.
    """
    batch, others = [r[:size] for r in rows], [r[-size:] for r in rows]
    expected = function(*batch)
    copies = function(*(r[:1].expand_as(r).contiguous() for r in batch))
    if not torch.equal(copies, expected[:1].expand_as(copies)):
        return False
    for shift in {0, 1, size // 2, size - 1}:
        if not torch.equal(function(*(r.roll(shift, 0) for r in batch)), expected.roll(shift, 0)):
            return False
    odd = torch.arange(size) % 2 == 1
    for kept in (odd, ~odd):
        for neighbours in (
            others,
            [torch.zeros_like(r) for r in batch],
            [1e38 * r for r in others],
        ):
            mixed = []
            for row, neighbour in zip(batch, neighbours, strict=True):
                mixed.append(neighbour.clone())
                mixed[-1][kept] = row[kept]
            if not torch.equal(function(*mixed)[kept], expected[kept]):
                return False
    return True


def _padded(rows: Tensor, size: int) -> Tensor:
    """With zeros to a full batch."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
