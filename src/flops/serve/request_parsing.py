"""The desk: opens a request, and finds out whether it was answered before.

It belongs to the thread of the model, so that a request changes threads as little as possible: to
the model, from there to the ledger, and back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from flops.serve.codec import WireError
from flops.serve.schema import Shape, Units, read_points, read_score
from flops.serve.scorer import Task
from flops.serve.store import Answer, Ledger


@dataclass(frozen=True)
class Letter:
    """A request as it arrived."""

    key: str
    digest: str  # of the body
    body: bytearray
    as_json: bool = False


@dataclass(eq=False)
class Desk:
    """Opens letters.

    Args:
        ledger: Of answers and points.
        shape: What a request may hold.
        channels: Of the model's images.
        memory: Bytes of points that are held in memory.
    """

    ledger: Ledger
    shape: Shape
    channels: int
    memory: int
    _pixels: OrderedDict[str, Tensor] = field(default_factory=OrderedDict, init=False)

    def open(self, letter: Letter) -> Task | Answer:
        """What has to be computed, or the answer that was given before.

        Raises:
            WireError: 409 if the key belongs to another body, 404 if there are no such points, 400
                or 422 if the body does not fit, 507 if the ledger is full.
            LedgerError: The ledger cannot be read.
        """
        kept = self.ledger.find(letter.key)
        if kept is not None:
            if kept.digest != letter.digest:
                raise taken(letter.key)
            return kept
        request = read_score(letter.body, self.shape, letter.as_json)
        pixels = self._points(request.points)
        if int(request.rows.max()) >= len(pixels):
            raise WireError(f"rows must be in 0 to {len(pixels) - 1}, the points that are there")
        full = None if self.ledger.damaged(letter.key) else self.ledger.full()
        if full is not None:  # before anything is computed
            raise WireError(full, 507)
        return Task(request, Units.of(request, self.shape.classes), pixels)

    def _points(self, name: str) -> Tensor:
        pixels = self._pixels.get(name)
        if pixels is None:
            body = self.ledger.points(name)
            if body is None:
                raise WireError(f"no points {name} here; upload them with PUT /v1/points/...", 404)
            pixels = self._pixels[name] = read_points(body, self.shape, self.channels)
            while len(self._pixels) > 1 and sum(p.numel() for p in self._pixels.values()) > (
                self.memory
            ):
                self._pixels.popitem(last=False)
        self._pixels.move_to_end(name)
        return pixels


def taken(key: str) -> WireError:
    """The refusal of a key that belongs to another body."""
    return WireError(f"the Idempotency-Key {key} was used for another body; choose a new one", 409)
