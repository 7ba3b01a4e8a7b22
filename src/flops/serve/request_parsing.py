"""Parses requests, and looks up stored answers.

It runs in the model's thread, so that a request changes threads as rarely as possible: to the
model, to the answer store, and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache
from torch import Tensor

from flops.serve.codec import WireError
from flops.serve.schema import Encodings, Shape, read_points, read_score
from flops.serve.scorer import ParsedRequest
from flops.serve.store import AnswerStore, StoredAnswer


@dataclass(frozen=True)
class RawRequest:
    """A request as it arrived."""

    key: str
    digest: str  # of the body
    body: bytearray
    as_json: bool = False


@dataclass(eq=False)
class RequestParser:
    """Parses and checks requests.

    Args:
        store: Store of answers and points.
        shape: Limits of a request.
        channels: Channels of the model's images.
        memory: Bytes of cached points, at least the limit of an upload.
    """

    store: AnswerStore
    shape: Shape
    channels: int
    memory: int

    def __post_init__(self) -> None:
        self._pixels: LRUCache[str, Tensor] = LRUCache(self.memory, Tensor.numel)

    def parse(self, raw: RawRequest) -> ParsedRequest | StoredAnswer:
        """Parse a request, or return its stored answer.

        Raises:
            WireError: 409 if the key belongs to another body, 404 if there are no such points, 400
                or 422 if the body is invalid, 507 if the store is full.
            StoreError: The store cannot be read.
        """
        kept = self.store.find(raw.key)
        if kept is not None:
            if kept.digest != raw.digest:
                raise key_conflict(raw.key)
            return kept
        request = read_score(raw.body, self.shape, raw.as_json)
        pixels = self._points(request.points)
        if int(request.rows.max()) >= len(pixels):
            raise WireError(f"rows must be in 0 to {len(pixels) - 1}, the uploaded points")
        full = None if self.store.damaged(raw.key) else self.store.full()
        if full is not None:  # before anything is computed
            raise WireError(full, 507)
        return ParsedRequest(request, Encodings.of(request, self.shape.classes), pixels)

    def _points(self, name: str) -> Tensor:
        pixels = self._pixels.get(name)
        if pixels is None:
            body = self.store.points(name)
            if body is None:
                raise WireError(f"no points {name}; upload them with PUT /v1/points/...", 404)
            pixels = self._pixels[name] = read_points(body, self.shape, self.channels)
        return pixels


def key_conflict(key: str) -> WireError:
    """The error for a key that belongs to another body."""
    return WireError(f"the Idempotency-Key {key} was used for another body; choose a new one", 409)
