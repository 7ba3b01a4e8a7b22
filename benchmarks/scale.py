"""Scale by simulation: one of R processes runs, with a model of the network.

The first of R ranks takes its steps on this machine, with everything that every process repeats
(the clean pass, noise of the others' draws, learning of shaped noise). Messages are not sent: their
sizes are counted, and a message of n bytes takes

    2 ceil(log2 R) * LATENCY + 2 (R - 1) / R * n / BANDWIDTH

as in a ring for long messages and a tree for short ones. The time of a step is that of the process
plus that of its messages, without overlap. Results of the other ranks are replaced by copies of
this rank's.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.quality import BATCH, finetuned, loss_fn
from benchmarks.scaling import METHODS
from flops import ForwardGradient
from flops.engine.collectives import Collectives
from flops.tasks.classification import digits

LATENCY = 50e-6  # seconds: data centre Ethernet, sockets
BANDWIDTH = 1.25e9  # bytes per second: 10 Gbit/s
SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)
WARM, STEPS = 9, 5  # block and stage targets measure Jacobians in the first 8


@dataclass
class Simulated(Collectives):
    """Rank 0 of a simulated process group."""

    network: float = 0.0

    def all_gather(self, mine: Tensor, begin: int, total: int) -> Tensor:
        whole = mine if len(mine) else torch.ones(1, dtype=mine.dtype)
        return self._message(whole.repeat(-(-total // len(whole)))[:total], "SUM")

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        return [self.size * v for v in super().sum_scalars(values)]

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        share, size = 2 * (self.size - 1) / self.size, tensor.numel() * tensor.element_size()
        self.network += 2 * math.ceil(math.log2(self.size)) * LATENCY + share * size / BANDWIDTH
        return tensor


def run() -> dict[str, Any]:
    """Milliseconds and bytes of a step by number of processes, for every method."""
    train = digits().train
    model = finetuned(train, 60)
    x, y = train.images[:BATCH], train.labels[:BATCH]
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, (groups, allocator) in METHODS.items():
        alone = 0.0
        for size in SIZES:
            ranks = Simulated(size=size)
            fg = ForwardGradient(
                model,
                loss_fn,
                groups(model),
                allocator=allocator(),
                process_group=ranks if size > 1 else None,
            )
            seconds, network, sent = [], [], []
            for _ in range(WARM + STEPS):
                before = ranks.network, ranks.sent
                seconds.append(fg.estimate(x, y, index=torch.arange(BATCH)).seconds)
                network.append(ranks.network - before[0])
                sent.append(ranks.sent - before[1])
            work = statistics.median(seconds[WARM:])
            wire = statistics.median(network[WARM:])
            alone = work if size == 1 else alone
            results[f"{name}, {size}"] = {
                "ms": 1e3 * (work + wire),
                "ms of the process": 1e3 * work,
                "ms of messages": 1e3 * wire,
                "kB of messages": statistics.median(sent[WARM:]) / 1e3,
                "speed-up": alone / (work + wire),
                "efficiency": alone / (work + wire) / size,
            }
    torch.set_num_threads(threads)
    return results
