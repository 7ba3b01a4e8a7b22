"""Learned allocators under data parallelism: they learn from the points of all replicas."""

from __future__ import annotations

from dataclasses import replace

import torch

from flops.allocators.base import Learner, Signal, Traces
from flops.passes.ranks import Replicas


def learn_jointly(allocator: Learner, signal: Signal, traces: Traces, replicas: Replicas) -> None:
    """Train an allocator on the batch of all replicas.

    Args:
        allocator: The allocator.
        signal: Of this replica, in the order that the allocator is given.
        traces: Of this replica.
        replicas: The replicas.
    """
    whole, all_traces = joined(signal, traces, replicas, allocator.most_points)
    if whole.index is not None:
        order = torch.argsort(whole.index)
        whole, all_traces = whole.at(order), all_traces.at(order)
    allocator.learn(whole, all_traces)
    allocator.note_own(signal, traces)


def joined(
    signal: Signal, traces: Traces, replicas: Replicas, most: int | None
) -> tuple[Signal, Traces]:
    """Signal and traces of all replicas' points, or of the first of each if these are too many.

    Args:
        signal: Of this replica.
        traces: Of this replica.
        replicas: The replicas.
        most: Largest number of points; None for all.
    """
    sizes, total = replicas.sizes, replicas.total
    if most is not None and total > most:
        sizes = tuple(max(1, most * size // total) for size in sizes)
    count = sizes[replicas.rank]
    each = torch.full_like(traces.values, signal.budget / len(signal.losses))
    places = torch.zeros_like(traces.draws) if signal.index is None else signal.index
    columns = [signal.losses, traces.values, traces.draws, each, places]
    table = torch.stack([column[:count].double() for column in columns], 1)
    losses, values, draws, budgets, index = replicas.gather(table, sizes).unbind(1)
    embeddings = signal.embeddings
    if embeddings is not None:
        embeddings = replicas.gather(embeddings[:count], sizes)
    budget = round(float(budgets.sum())) // signal.unit * signal.unit
    found = replace(
        signal,
        losses=losses.to(signal.losses.dtype),
        budget=budget,
        index=None if signal.index is None else index.long(),
        embeddings=embeddings,
    )
    return found, Traces(values.to(traces.values.dtype), draws.to(traces.draws.dtype))
