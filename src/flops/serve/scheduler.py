"""Dynamic batching: requests that arrive while the model is busy are computed together.

One thread parses requests and runs the model. Its answers go to the store, which writes them while
the next are computed; a caller gets an answer when it is on disk. Under load no request waits; when
idle, one that does not fill a batch waits for the batching window of `window` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flops.serve.codec import WireError, encode
from flops.serve.request_parsing import RawRequest, RequestParser
from flops.serve.scorer import ParsedRequest, Scorer
from flops.serve.store import AnswerStore, StoredAnswer, StoreError

log = logging.getLogger("flops.serve")
ROUND = 8  # batches of images per round, after which answers are written


@dataclass(frozen=True, eq=False)
class Job:
    """A request and the future of its answer, with True for a replay."""

    raw: RawRequest
    future: asyncio.Future[tuple[StoredAnswer, bool]]


Work = tuple[Job, ParsedRequest]
Outcome = tuple[Job, StoredAnswer | Exception, bool]


@dataclass(eq=False)
class Scheduler:
    """Queue and thread of the model.

    Args:
        parser: Parses the requests.
        scorer: Computes the logits.
        store: Stores the answers.
        queue: Largest number of requests in flight.
        window: Batching window: seconds to wait for others when a batch is not full.
        threads: Number of torch threads; None for its default.
    """

    parser: RequestParser
    scorer: Scorer
    store: AnswerStore
    queue: int = 1024
    window: float = 0.002
    threads: int | None = None
    rows: int = field(default=0, init=False)  # computed so far
    rounds: int = field(default=0, init=False)
    requests: int = field(default=0, init=False)
    busy: float = field(default=0.0, init=False)  # seconds of the model
    waiting: int = field(default=0, init=False)  # requests; changed by the event loop only

    def __post_init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._carried: deque[Work] = deque()  # left over from the last round
        self._news = threading.Condition()
        self._stop = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def score(self, raw: RawRequest) -> tuple[StoredAnswer, bool]:
        """Compute and store an answer, or look it up; True for a replay.

        Raises:
            WireError: 429 if too many are in flight, what `RequestParser.parse` raises, 422 if
                logits are not finite, 503 if the answer cannot be stored, 500 if the model fails.
        """
        if self.waiting >= self.queue:
            speed = self.requests / self.busy if self.busy else self.queue
            raise WireError(
                f"{self.waiting} requests are in flight, which is the limit",
                429,
                self.waiting / max(speed, 1),
            )
        job = Job(raw, self._loop.create_future())
        self.waiting += 1
        try:
            with self._news:
                self._jobs.append(job)
                self._news.notify()
            return await job.future
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Finish the requests in flight and end the thread."""
        with self._news:
            self._stop = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)  # set per thread
        while True:
            with self._news:
                self._news.wait_for(lambda: self._jobs or self._carried or self._stop)
                if not self._jobs and not self._carried:
                    return
            works = self._round()
            if not works:
                continue
            started = time.perf_counter()
            try:
                found = self.scorer.score([task for _, task in works])
            except Exception:
                log.exception("the model failed")
                error = WireError("the model failed; see the log of the service", 500)
                self._settle([(job, error, False) for job, _ in works])
                continue
            self.rounds += 1
            self.requests += len(works)
            self.rows += sum(task.encodings.cost.queries for _, task in works)
            self.busy += time.perf_counter() - started
            self._keep(works, found)

    def _round(self) -> list[Work]:
        """The next requests: as many as the scorer accepts at once, in full batches if possible."""
        batch = self.scorer.image_batch
        most = min(ROUND * batch, self.scorer.most_images)
        works: list[Work] = []
        rows = texts = 0
        end = time.monotonic() + self.window
        while True:
            work = self._carried.popleft() if self._carried else self._next()
            if work is None:
                if not works or rows >= batch or not self._more(end - time.monotonic()):
                    break
                continue
            task = work[1]
            rows, texts = rows + len(task.encodings.images), texts + len(task.request.text)
            if works and (rows > most or texts > self.scorer.most_texts):
                self._carried.appendleft(work)
                rows -= len(task.encodings.images)
                break
            works.append(work)
        # A last partial batch may be filled in the next round.
        extra = rows % batch if rows > batch else 0
        while len(works) > 1 and 0 < len(works[-1][1].encodings.images) <= extra:
            extra -= len(works[-1][1].encodings.images)
            self._carried.appendleft(works.pop())
        return works

    def _more(self, seconds: float) -> bool:
        """Whether another request arrives in time."""
        with self._news:
            return bool(self._news.wait_for(lambda: self._jobs, max(0.0, seconds)))

    def _next(self) -> Work | None:
        """The next request to compute; replays and errors are settled at once."""
        settled: list[Outcome] = []
        found: Work | None = None
        while self._jobs and found is None:
            job = self._jobs.popleft()  # deques are thread-safe
            try:
                parsed = self.parser.parse(job.raw)
            except WireError as error:
                settled.append((job, error, False))
            except StoreError as error:
                log.error("%s", error)
                unread = WireError("the answer store cannot be read; retry", 503, 1)
                settled.append((job, unread, False))
            except Exception:
                log.exception("a request could not be parsed")
                settled.append((job, WireError("the service failed", 500), False))
            else:
                if isinstance(parsed, ParsedRequest):
                    found = job, parsed
                else:
                    settled.append((job, parsed, True))
        self._settle(settled)
        return found

    def _keep(self, works: Sequence[Work], found: Sequence[Tensor]) -> None:
        """Store answers, and return them to their callers when they are on disk."""
        good: list[Outcome] = []
        answers: list[StoredAnswer] = []
        for (job, task), logits in zip(works, found, strict=True):
            if not bool(torch.isfinite(logits).all()):
                message = "the logits are not finite for these prompts; use smaller ones"
                self._settle([(job, WireError(message), False)])
                continue
            raw, body = job.raw, encode({"logits": logits})
            answer = StoredAnswer(raw.key, raw.digest, body, task.encodings.cost)
            answers.append(answer)
            good.append((job, answer, self.store.damaged(raw.key)))  # already charged

        def done(error: Exception | None) -> None:
            if error is None:
                self._settle(good)
                return
            failed = WireError("the answer could not be stored, so it is not sent", 503, 1)
            self._settle([(job, failed, False) for job, _, _ in good])

        if good:
            self.store.keep(answers, done)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Resolve futures, all at once; from any thread."""
        if outcomes:
            self._loop.call_soon_threadsafe(_tell, outcomes)


def _tell(outcomes: Sequence[Outcome]) -> None:
    for job, outcome, again in outcomes:
        if job.future.done():
            continue
        if isinstance(outcome, StoredAnswer):
            job.future.set_result((outcome, again))
        else:
            job.future.set_exception(outcome)
