"""Allocator: share of the time of a step (B = 64, 20 queries), and milliseconds at B = 256."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.quality import BATCH, finetuned, loss_fn, thirds
from flops import ForwardGradient, LikelihoodRatio
from flops.allocators import Bernoulli, Gaussian, Learner, Neyman, Signal, Traces
from flops.tasks.classification import digits

STEPS = 40
ALLOCATORS: dict[str, Callable[[], Any]] = {
    "Bernoulli": Bernoulli,
    "Gaussian": Gaussian,
    "Neyman": Neyman,
}


class Timed(Learner):
    """Measures the time spent in an allocator."""

    def __init__(self, inner: Any, seconds: list[float] | None = None) -> None:
        self.inner, self.seconds = inner, [0.0] if seconds is None else seconds
        self.pilot, self.min_queries = inner.pilot, inner.min_queries

    @property
    def wants_embeddings(self) -> bool:
        return self.inner.wants_embeddings

    def __deepcopy__(self, memo: Any) -> Timed:
        return Timed(copy.deepcopy(self.inner), self.seconds)  # one clock for all groups

    def __copy__(self) -> Timed:
        return Timed(copy.copy(self.inner), self.seconds)

    def _time(self, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        out = run()
        self.seconds[0] += time.perf_counter() - started
        return out

    def allocate(self, signal: Signal) -> torch.Tensor:
        return self._time(lambda: self.inner.allocate(signal))

    def learn(self, signal: Signal, traces: Traces) -> None:
        self._time(lambda: self.inner.learn(signal, traces))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run() -> dict[str, Any]:
    """Shares of a step, then milliseconds at B = 256 on one thread."""
    train = digits().train
    model = finetuned(train, 60)
    x, y = train.images[:BATCH], train.labels[:BATCH]
    results: dict[str, Any] = {}
    for name, make in ALLOCATORS.items():
        timed = Timed(make())
        fg = ForwardGradient(model, loss_fn, thirds(model, LikelihoodRatio()), allocator=timed)
        fg.estimate(x, y)
        shares = []
        for _ in range(STEPS):
            timed.seconds[0] = 0.0
            seconds = fg.estimate(x, y).seconds
            shares.append(timed.seconds[0] / seconds)
        large = make()
        source = torch.Generator().manual_seed(0)
        losses = torch.rand(256, generator=source)
        embeddings = torch.randn(256, 64, generator=source)
        signal = Signal(losses, 20 * 256, 1, 1, "g", None, embeddings)
        traces = Traces(losses**2, torch.full((256,), 20.0))
        allocate, learn = [], []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(STEPS):
            started = time.perf_counter()
            large.allocate(signal)
            middle = time.perf_counter()
            large.learn(signal, traces)
            allocate.append(1e3 * (middle - started))
            learn.append(1e3 * (time.perf_counter() - middle))
        torch.set_num_threads(threads)
        results[name] = {
            "share of a step": statistics.median(shares),
            "mean share": statistics.mean(shares),
            "target": 0.03,
            "ms to allocate, B = 256": statistics.median(allocate),
            "ms to learn, B = 256": statistics.median(learn),
        }
    return results
