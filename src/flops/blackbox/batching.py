"""Dynamic batching: whatever has arrived while the model was busy is computed together.

One thread runs the model. Its answers go to the ledger, which writes them while the next are
computed; a caller gets an answer when it is on disk. There is no need to wait for company under
load; alone, a request that does not fill a batch waits `window` seconds for others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flops.blackbox.ledger import Answer, Ledger
from flops.blackbox.scoring import Scorer, Task
from flops.blackbox.wire import WireError, encode

log = logging.getLogger("flops.serve")


@dataclass(frozen=True, eq=False)
class Job:
    """A task with the key that its answer is kept under, and who waits for it."""

    task: Task
    key: str
    digest: str
    future: asyncio.Future[Answer]

    @property
    def rows(self) -> int:
        """Rows to score."""
        return len(self.task.units.texts)


@dataclass(eq=False)
class Batcher:
    """Queue and thread of the model.

    Args:
        scorer: Computes.
        ledger: Keeps the answers.
        queue: Most rows that wait or are computed.
        window: Seconds to wait for company of a request that does not fill a batch.
        threads: Of torch; None for its own choice.
    """

    scorer: Scorer
    ledger: Ledger
    queue: int = 16384
    window: float = 0.002
    threads: int | None = None
    rows: int = field(default=0, init=False)  # computed so far
    rounds: int = field(default=0, init=False)
    busy: float = field(default=0.0, init=False)  # seconds of the model
    waiting: int = field(default=0, init=False)  # rows; changed by the event loop alone

    def __post_init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._news = threading.Condition()
        self._stop = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def score(self, task: Task, key: str, digest: str) -> Answer:
        """Compute, keep and return an answer.

        Raises:
            WireError: 429 if too many rows wait, 422 if logits are not finite, 503 if the answer
                cannot be kept, 500 if the model fails.
        """
        job = Job(task, key, digest, self._loop.create_future())
        if self.waiting + job.rows > self.queue and self.waiting:
            speed = self.rows / self.busy if self.busy else self.queue
            raise WireError(
                f"{self.waiting} rows wait and {self.queue} may", 429, self.waiting / max(speed, 1)
            )
        self.waiting += job.rows
        try:
            with self._news:
                self._jobs.append(job)
                self._news.notify()
            return await job.future
        finally:
            self.waiting -= job.rows

    def close(self) -> None:
        """Finish what waits and end the thread."""
        with self._news:
            self._stop = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)  # a setting of each thread
        while jobs := self._round():
            started = time.perf_counter()
            try:
                found = self.scorer.score([job.task for job in jobs])
            except Exception:
                log.exception("the model failed")
                self._loop.call_soon_threadsafe(_fail, jobs, WireError("the model failed", 500))
                continue
            self.rounds += 1
            self.rows += sum(job.rows for job in jobs)
            self.busy += time.perf_counter() - started
            self._keep(jobs, found)

    def _round(self) -> list[Job]:
        """The next jobs, as many as the scorer takes at once; none at the end."""
        most = min(4 * self.scorer.image_batch, self.scorer.most_images)
        jobs: list[Job] = []
        rows = texts = 0
        with self._news:
            self._news.wait_for(lambda: self._jobs or self._stop)
            batch = self.scorer.image_batch
            if sum(job.rows for job in self._jobs) < batch and not self._stop and self.window:
                self._news.wait_for(
                    lambda: sum(job.rows for job in self._jobs) >= batch, timeout=self.window
                )
            while self._jobs:
                job = self._jobs[0]
                few = len(job.task.request.text)
                if jobs and (rows + job.rows > most or texts + few > self.scorer.most_texts):
                    break
                rows, texts = rows + job.rows, texts + few
                jobs.append(self._jobs.popleft())
        return jobs

    def _keep(self, jobs: list[Job], found: list[Tensor]) -> None:
        """Hand answers to the ledger, and to those who wait when they are kept."""
        good: list[tuple[Job, Answer]] = []
        for job, logits in zip(jobs, found, strict=True):
            if not bool(torch.isfinite(logits).all()):
                message = "the logits are not finite for these prompts; use smaller ones"
                self._loop.call_soon_threadsafe(_fail, [job], WireError(message))
                continue
            body = encode({"logits": logits})
            good.append((job, Answer(job.key, job.digest, body, job.task.units.cost)))

        def done(error: Exception | None) -> None:
            if error is not None:
                log.error("the ledger cannot be written: %s", error)
                failed = WireError("the answer could not be kept, so it is not given", 503, 1)
                self._loop.call_soon_threadsafe(_fail, [job for job, _ in good], failed)
            else:
                self._loop.call_soon_threadsafe(_finish, good)

        if good:
            self.ledger.keep([answer for _, answer in good], done)


def _fail(jobs: list[Job], error: Exception) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(error)


def _finish(answers: list[tuple[Job, Answer]]) -> None:
    for job, answer in answers:
        if not job.future.done():
            job.future.set_result(answer)
