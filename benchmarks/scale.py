"""Scale by simulation: the time of a data-parallel step of 1 to 1,024 ranks.

The first of R ranks takes its steps on this machine, with all that every rank repeats (learning of
allocators, rows of the mean Jacobian). Its messages are counted, not sent; of n bytes, one takes

    2 ceil(log2 R) * LATENCY + 2 (R - 1) / R * n / bandwidth

as in a ring for long messages and a tree for short ones. The time of a step is that of the rank
plus that of its messages, without overlap. Other ranks are replaced by copies of this one.

Constants of the model, all measured here: seconds of a step alone, seconds of it as one of 1,024,
messages and bytes. The batch of a rank is fixed, so efficiency is the time alone over the time of R
ranks.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.real_models import MODELS, Problem, missing
from benchmarks.scaling import settle
from flops import ForwardGradient
from flops.engine.collectives import Collectives
from flops.engine.fingerprint import Fingerprint
from flops.training.methods import Method, MethodName, engine

LATENCY = 50e-6  # seconds: data centre Ethernet, sockets
BANDWIDTHS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}  # bytes per second
SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)
METHODS: tuple[MethodName, ...] = ("shaped-lr", "lr", "mezo")
QUERIES = 20
WARM, STEPS = 2, 2


@dataclass
class Simulated(Collectives):
    """Rank 0 of a simulated process group, whose other ranks are copies of it."""

    def meet(
        self, points: int, prints: Fingerprint, batch: Callable[[bool], float]
    ) -> tuple[int, ...]:
        self._message(torch.zeros(2 * len(prints.values()) + self.size).double(), "MAX")
        return (points,) * self.size

    def all_gather(self, mine: Tensor, begin: int, total: int) -> Tensor:
        whole = mine.cpu() if len(mine) else torch.ones(1, dtype=mine.dtype)
        return self._message(whole.repeat(-(-total // len(whole)))[:total], "MAX")

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        return tensor.mul_(self.size) if how == "SUM" else tensor

    def fail(self, error: BaseException, always: bool = False) -> None:
        """Nobody is told."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, and the messages and bytes of one."""

    seconds: float
    messages: float
    sent: float

    def network(self, ranks: int, bandwidth: float) -> float:
        """Seconds of all messages of a step."""
        if ranks == 1:
            return 0.0
        hops = 2 * math.ceil(math.log2(ranks)) * LATENCY
        return self.messages * hops + 2 * (ranks - 1) / ranks * self.sent / bandwidth


def measure(
    make: Callable[[], ForwardGradient], inputs: Any, targets: Any, size: int, steps: int = STEPS
) -> Measured:
    """Steps of one of ``size`` ranks."""
    ranks, fg = Simulated(size=size), make()
    fg.process_group = ranks if size > 1 else None
    seconds, messages, sent = [], [], []
    for step in range(WARM + steps):
        before = ranks.messages, ranks.sent
        seconds.append(fg.estimate(inputs, targets).seconds)
        messages.append(ranks.messages - before[0])
        sent.append(ranks.sent - before[1])
        if step == 0:
            settle(fg)
    return Measured(
        statistics.median(seconds[WARM:]),
        statistics.median(messages[WARM:]),
        statistics.median(sent[WARM:]),
    )


def table(alone: Measured, one: Measured, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Efficiency by network and number of ranks, with the constants of the model."""
    row: dict[str, Any] = {
        "s alone": alone.seconds,
        "s of 1,024": one.seconds,
        "messages": one.messages,
        "MB": one.sent / 1e6,
    }
    for name, bandwidth in BANDWIDTHS.items():
        for ranks in sizes[1:]:
            # Repeated work is bounded, and reaches its bound before 1,024 ranks.
            work = max(alone.seconds, one.seconds)
            row[f"{ranks}, {name}"] = alone.seconds / (work + one.network(ranks, bandwidth))
    return row


def run(
    models: Sequence[str] = ("smollm2-48", "vit-base"),
    steps: int = STEPS,
    methods: Sequence[MethodName] = METHODS,
) -> dict[str, Any]:
    """Constants and efficiencies of every method and model."""
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in models:
        if (why := missing(name)) is not None:
            results[name] = {"missing": why}
            continue
        problem: Problem = MODELS[name]()
        problem.model.requires_grad_(True)
        for method in methods:
            sys.stderr.write(f"scale: {name}, {method}\n")
            make = partial(engine, problem.model, problem.loss_fn, Method(method, QUERIES))
            found = [
                measure(make, problem.inputs, problem.targets, size, steps) for size in (1, 1024)
            ]
            results[f"{name}, {method}"] = table(*found)
    torch.set_num_threads(threads)
    return results
