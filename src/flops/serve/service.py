"""The service without HTTP: idempotent answers, stored points, counters."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flops.serve.codec import WireError, digest
from flops.serve.config import ServeConfig
from flops.serve.limits import BodyReader, Limits, TokenBucket, WrongKeyLimit
from flops.serve.metrics import Metrics, resident_bytes
from flops.serve.request_parsing import RawRequest, RequestParser, key_conflict
from flops.serve.scheduler import Scheduler
from flops.serve.schema import Shape, read_points
from flops.serve.scorer import PromptedModel, Scorer
from flops.serve.store import AnswerStore, StoredAnswer

LARGE = 2**17  # larger bodies are parsed outside the event loop, in bytes


@dataclass(frozen=True)
class Setup:
    """Validated and opened parts of the service.

    Args:
        name: Name of the model, for display.
        weights: Digest of model and classes, which the answers depend on.
        model: The frozen model.
        scorer: Computes logits.
        store: Store of answers and points.
        limits: Limits of requests.
        window: Batching window in seconds.
        threads: Number of torch threads; None for its default.
        api_key: Key that clients must send; None for no authentication.
        open_docs: Whether /docs and /openapi.json need no key.
    """

    name: str
    weights: str
    model: PromptedModel
    scorer: Scorer
    store: AnswerStore
    limits: Limits
    window: float = 0.002
    threads: int | None = None
    api_key: str | None = None
    open_docs: bool = True

    @property
    def shape(self) -> Shape:
        """Limits of a request."""
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


def set_up(config: ServeConfig, model: PromptedModel, api_key: str | None) -> Setup:
    """Check the batch sizes of a model, and open its answer store.

    Raises:
        FlopsError: The model's weights are damaged, or the store cannot be opened.
    """
    weights = model.digest()
    scorer = Scorer(model, config.text_batch, config.image_batch)
    limits = Limits(
        rows=config.max_rows,
        body=config.max_body * 2**20,
        upload=config.max_body * 2**23,
        stored=config.max_stored * 2**20,
        queue=config.max_queue,
        tokens=config.max_tokens,
        rate=config.rate,
        patience=config.timeout,
        store=config.max_ledger * 2**20,
    )
    return Setup(
        name=config.model,
        weights=weights,
        model=model,
        scorer=scorer,
        store=AnswerStore(config.store_path(weights), weights, limits.store),
        limits=limits,
        window=config.window / 1000,
        threads=config.threads,
        api_key=api_key,
        open_docs=config.local,
    )


@dataclass(frozen=True, eq=False)
class _InFlight:
    digest: str
    task: asyncio.Task[tuple[StoredAnswer, bool]]


class Service:
    """The running service; created and used in the event loop."""

    def __init__(self, setup: Setup) -> None:
        limits = setup.limits
        self.setup = setup
        self.shape = setup.shape
        self.rate = TokenBucket(limits.rate)
        self.wrong_keys = WrongKeyLimit()
        self.bodies = BodyReader(limits.memory, limits.patience)
        self.metrics = Metrics(self._counters, self._gauges)
        memory = max(limits.memory, limits.upload)
        parser = RequestParser(setup.store, self.shape, setup.model.channels, memory)
        self.scheduler = Scheduler(
            parser, setup.scorer, setup.store, limits.queue, setup.window, setup.threads
        )
        self._in_flight: dict[str, _InFlight] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    async def answer(self, key: str, body: bytearray, as_json: bool) -> tuple[StoredAnswer, bool]:
        """The answer to a body under a key, and whether it is a replay.

        Requests with the same key in flight share one computation.

        Raises:
            WireError: 409 if the key belongs to another body, and the errors of `Scheduler.score`.
        """
        mark = await self.in_thread(digest, body) if len(body) > LARGE else _digest(body)
        flight, fresh = self._in_flight.get(key), False
        if flight is None:
            fresh = True
            raw = RawRequest(key, mark, body, as_json)
            flight = _InFlight(mark, asyncio.create_task(self.scheduler.score(raw)))
            self._in_flight[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        elif flight.digest != mark:
            raise key_conflict(key)
        # Shielded: a client that disconnects does not cancel the computation for others.
        answer, kept = await asyncio.shield(flight.task)
        if kept or not fresh:
            self.setup.store.replayed()
        return answer, kept or not fresh

    async def upload(self, name: str, body: bytearray) -> bool:
        """Store points under their digest; False if they already were.

        Raises:
            WireError: The digest is not that of the body, or the points do not fit.
        """
        if await self.in_thread(digest, body) != name:
            raise WireError("the digest in the address is not the SHA-256 of the body")
        read_points(body, self.shape, self.setup.model.channels)
        if await self.in_thread(self.setup.store.has_points, name):
            return False
        if (full := self.setup.store.full()) is not None:
            raise WireError(full, 507)
        stored = await self.in_thread(self.setup.store.stored)
        if stored + len(body) > self.setup.limits.stored:
            raise WireError(
                f"{stored} bytes of points are stored; the limit is {self.setup.limits.stored}", 413
            )
        loop = asyncio.get_running_loop()
        kept: asyncio.Future[None] = loop.create_future()

        def done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(_settle, kept, error)

        self.setup.store.keep_points(name, body, done)
        await kept
        return True

    def info(self) -> dict[str, Any]:
        """Model and limits, for clients."""
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

    def _counters(self) -> dict[str, float]:
        scheduler, scorer = self.scheduler, self.setup.scorer
        return {
            "rows": scheduler.rows,
            "rounds": scheduler.rounds,
            "model_seconds": scheduler.busy,
            "batches": scorer.batches,
            "encoded": scorer.used,
            "padding": scorer.padded,
            **scorer.cache,
        }

    def _gauges(self) -> dict[str, float]:
        return {
            "waiting_requests": self.scheduler.waiting,
            "held_bytes": self.bodies.held,
            "resident_bytes": resident_bytes(),
        }

    async def usage(self) -> dict[str, int]:
        """Totals of the answer store."""
        found: dict[str, int] = await self.in_thread(self.setup.store.usage)
        return found

    def close(self) -> None:
        """Finish the requests in flight."""
        self.scheduler.close()
        self._reader.shutdown()
        self.setup.store.close()

    def _landed(self, key: str, task: asyncio.Task[tuple[StoredAnswer, bool]]) -> None:
        del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # retrieved, to avoid a warning if all callers are gone

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        """Run a blocking function outside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, function, *arguments)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(WireError("the points could not be stored", 503, 1))


def _digest(body: bytearray) -> str:
    """As `digest`, in chunks so small that hashlib does not release the GIL.

    After releasing it, even for microseconds, one has to wait for the model's thread.
    """
    mark, view = hashlib.sha256(), memoryview(body)
    for begin in range(0, len(body), 2047):
        mark.update(view[begin : begin + 2047])
    return mark.hexdigest()
