"""What the service does, apart from HTTP: answer a key once, keep points, count."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flops.serve import metrics
from flops.serve.codec import WireError, digest
from flops.serve.limits import Bodies, Guesses, Limits, Rate
from flops.serve.request_parsing import Desk, Letter, taken
from flops.serve.scheduler import Batcher
from flops.serve.schema import Shape, read_points
from flops.serve.scorer import Prompted, Scorer
from flops.serve.store import Answer, Ledger

LARGE = 2**17  # bytes of a body that is read in another thread than the event loop's


@dataclass(frozen=True)
class Setup:
    """What the service is made of; everything is checked and open.

    Args:
        name: Of the model, for display.
        weights: Digest of what the answers depend on.
        model: The frozen model.
        scorer: Computes with it.
        ledger: Keeps answers and points.
        limits: What is accepted.
        window: Seconds that a lone request waits for company.
        threads: Of torch; None for its own choice.
        api_key: What clients have to show; None for nothing.
        open_docs: Whether /docs and /openapi.json are shown without the key.
    """

    name: str
    weights: str
    model: Prompted
    scorer: Scorer
    ledger: Ledger
    limits: Limits
    window: float = 0.002
    threads: int | None = None
    api_key: str | None = None
    open_docs: bool = True

    @property
    def shape(self) -> Shape:
        """What a request may hold."""
        model, scorer, limits = self.model, self.scorer, self.limits
        rows = min(limits.rows, scorer.most_images)
        return Shape(
            classes=len(model.classes),
            text_width=model.text_width,
            image_width=model.image_width,
            text_tokens=min(limits.tokens, model.text_limit),
            image_tokens=limits.tokens,
            rows=rows,
            texts=min(rows, scorer.most_texts),
            points=limits.points,
        )


@dataclass(frozen=True, eq=False)
class _Flight:
    digest: str
    task: asyncio.Task[tuple[Answer, bool]]


class State:
    """The running service; made and used in the event loop."""

    def __init__(self, setup: Setup) -> None:
        limits = setup.limits
        self.setup = setup
        self.shape = setup.shape
        self.rate = Rate(limits.rate)
        self.guesses = Guesses()
        self.bodies = Bodies(limits.memory, limits.patience)
        self.requests = metrics.Requests()
        desk = Desk(setup.ledger, self.shape, setup.model.channels, limits.memory)
        self.batcher = Batcher(
            desk, setup.scorer, setup.ledger, limits.queue, setup.window, setup.threads
        )
        self._flights: dict[str, _Flight] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    async def answer(self, key: str, body: bytearray, as_json: bool) -> tuple[Answer, bool]:
        """The answer to a body under a key, and whether it was there already.

        Whoever asks while it is being computed waits for the same computation.

        Raises:
            WireError: 409 if the key belongs to another body; and as `Batcher.score`.
        """
        mark = await self.in_thread(digest, body) if len(body) > LARGE else _digest(body)
        flight, fresh = self._flights.get(key), False
        if flight is None:
            fresh = True
            letter = Letter(key, mark, body, as_json)
            flight = _Flight(mark, asyncio.create_task(self.batcher.score(letter)))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        elif flight.digest != mark:
            raise taken(key)
        # Shielded: a caller that goes away neither stops the others nor wastes what is computed.
        answer, kept = await asyncio.shield(flight.task)
        if kept or not fresh:
            self.setup.ledger.replayed()
        return answer, kept or not fresh

    async def upload(self, name: str, body: bytearray) -> bool:
        """Keep points under their digest; False if they were there already.

        Raises:
            WireError: The digest is not that of the body, or the points do not fit.
        """
        if await self.in_thread(digest, body) != name:
            raise WireError("the digest in the address is not the SHA-256 of the body")
        read_points(body, self.shape, self.setup.model.channels)
        if await self.in_thread(self.setup.ledger.has_points, name):
            return False
        if (full := self.setup.ledger.full()) is not None:
            raise WireError(full, 507)
        stored = await self.in_thread(self.setup.ledger.stored)
        if stored + len(body) > self.setup.limits.stored:
            raise WireError(
                f"{stored} bytes of points are stored and {self.setup.limits.stored} may be", 413
            )
        loop = asyncio.get_running_loop()
        kept: asyncio.Future[None] = loop.create_future()

        def done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(_settle, kept, error)

        self.setup.ledger.keep_points(name, body, done)
        await kept
        return True

    def info(self) -> dict[str, Any]:
        """What a client has to know."""
        setup, model, shape = self.setup, self.setup.model, self.shape
        limits = setup.limits
        sizes = {f"{kind}, {m} tokens": n for (kind, m), n in sorted(setup.scorer.sizes.items())}
        return {
            "model": setup.name,
            "digest": setup.weights,
            "classes": list(model.classes),
            "channels": model.channels,
            "image_size": model.image_size,
            "text_width": model.text_width,
            "image_width": model.image_width,
            "max_tokens": {"text": shape.text_tokens, "image": shape.image_tokens},
            "limits": {
                "rows": shape.rows,
                "texts": shape.texts,
                "points": shape.points,
                "body_bytes": limits.body,
                "json_bytes": min(limits.body, limits.json),
                "upload_bytes": limits.upload,
                "queued_requests": limits.queue,
                "requests_per_second": limits.rate,
            },
            "batch_sizes": sizes,
            "batch_tolerance": setup.scorer.tolerance,
        }

    def metrics(self) -> str:
        """In the text format of Prometheus."""
        batcher, scorer = self.batcher, self.setup.scorer
        counters = {
            "rows_total": batcher.rows,
            "rounds_total": batcher.rounds,
            "model_seconds_total": batcher.busy,
            "batches_total": scorer.batches,
            "encoded_total": scorer.used,
            "padding_total": scorer.padded,
            **{f"{name}_total": value for name, value in scorer.cache.items()},
        }
        gauges = {
            "waiting_requests": batcher.waiting,
            "held_bytes": self.bodies.held,
            "resident_bytes": metrics.resident_bytes(),
        }
        lines = [*self.requests.lines(), *metrics.exposition(counters, gauges)]
        return "\n".join(lines) + "\n"

    async def usage(self) -> dict[str, int]:
        """Totals of the ledger."""
        found: dict[str, int] = await self.in_thread(self.setup.ledger.usage)
        return found

    def close(self) -> None:
        """Finish what waits."""
        self.batcher.close()
        self._reader.shutdown()
        self.setup.ledger.close()

    def _landed(self, key: str, task: asyncio.Task[tuple[Answer, bool]]) -> None:
        del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        """The result of a function that takes a while, computed beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, function, *arguments)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(WireError("the points could not be kept", 503, 1))


def _digest(body: bytearray) -> str:
    """As `digest`, in pieces so small that hashlib keeps the lock of the interpreter.

    Giving it up for some microseconds means waiting for the model's thread to give it back.
    """
    mark, view = hashlib.sha256(), memoryview(body)
    for begin in range(0, len(body), 2047):
        mark.update(view[begin : begin + 2047])
    return mark.hexdigest()
