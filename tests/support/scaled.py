"""Points whose traces are known by their scales, and an allocator that keeps what it was shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flops import (
    ForwardGradient,
    Group,
    LikelihoodRatio,
)
from flops.allocators import Equal, Learner, Signal

SIZE, QUERIES = 8, 10

LEAF = LikelihoodRatio(1e-5, "leaf")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def scaled(outputs: Tensor, scales: Tensor) -> Tensor:
    """Squared outputs times a scale for each point; the traces go by the scales' squares."""
    return scales * (outputs - 1).square().sum(1)


SCALES = torch.tensor([0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 10.0, 10.0]).double()


def engine(model: Net, allocator: Any, estimator: Any = LEAF, **options: Any) -> ForwardGradient:
    options.setdefault("queries", QUERIES)
    group = Group(model, estimator, options.pop("queries"), name="g")
    return ForwardGradient(model, scaled, group, allocator=allocator, **options)


class Spy(Learner):
    """An allocator that keeps what it was shown."""

    wants_embeddings = True
    min_queries = 1

    def __init__(self, pilot: int = 0) -> None:
        self.pilot = pilot
        self.seen: list[Signal] = []
        self.learned: list[tuple[Signal, Any]] = []

    def __deepcopy__(self, memo: Any) -> Spy:
        return self

    __copy__ = lambda self: self  # noqa: E731

    def allocate(self, signal: Signal) -> Tensor:
        self.seen.append(signal)
        return Equal().allocate(signal)

    def learn(self, signal: Signal, traces: Any) -> None:
        self.learned.append((signal, traces))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
