"""Allocation: J of each allocator over J of the optimal integer counts with the same floor.

Traces are measured with 200 queries per point on batches of the bundled ViT at three stages of
training; mean over the thirds of the network and over seeds (batches). "best of family" is the best
mean of the Gaussian allocator on a fine grid, a lower bound for counts that are affine in
tanh(loss). With "2 queries", Neyman has traces from two queries per point only. "equal traces" is J
over J of equal counts if all traces are equal.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from benchmarks.quality import QUERIES, finetuned, loss_fn, thirds
from flops import ForwardGradient, LikelihoodRatio
from flops.allocators import Bernoulli, Equal, Gaussian, Neyman, Signal, Traces
from flops.allocators.counts import feasible, integer_optimum, objective
from flops.diagnostics.traces import spend_counts
from flops.estimators.variance import traces_of
from flops.tasks.classification import digits
from flops.tasks.data.digits import Split

STAGES = {"early": 20, "middle": 60, "late": 150}
SIZES = (16, 64, 256)
SEEDS = 5
TRACE_QUERIES = 200


def batch(train: Split, size: int, seed: int) -> Tensor:
    return torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:size]


def measured(model: Any, train: Split, rows: Tensor) -> list[tuple[Signal, Tensor]]:
    """Signal and traces of each third."""
    fg = ForwardGradient(model, loss_fn, thirds(model, LikelihoodRatio()), chunk=512)
    fg.embed_points()
    found = []
    with fg.session(train.images[rows], train.labels[rows]) as session:
        for number in range(3):
            counts = torch.full((len(rows),), TRACE_QUERIES)
            group, binding = fg.groups[number], session.layout.bindings[number]
            queries = session.queries(group.name, fg.key(number), {})
            spent = spend_counts(session, group, binding, queries, counts)
            traces = traces_of(spent.step.estimate, len(rows))
            found.append((fg.signal(number, session), traces.values))
    return found


def part(signal: Signal, size: int) -> Signal:
    """The first points of a batch: traces and embeddings do not depend on the other points."""
    assert signal.embeddings is not None
    return replace(
        signal,
        losses=signal.losses[:size],
        embeddings=signal.embeddings[:size],
        budget=QUERIES * size,
    )


def over_optimum(signal: Signal, traces: Tensor, seed: int) -> dict[str, float]:
    """J of each allocator over J of the optimal integer counts with the same floor."""
    values = traces.double().numpy()
    best = objective(values, integer_optimum(values, signal.budget).astype(np.float64))

    def ratio(counts: Tensor) -> float:
        return float(objective(values, counts.double().numpy()) / best)

    def at(step: int) -> Signal:
        return replace(signal, key=(seed, step, 0))

    size = len(traces)
    known = Traces(traces, torch.full((size,), float(TRACE_QUERIES)))
    flat = Traces(torch.ones(size), known.draws)
    gaussian, flattened = Gaussian(), Gaussian()
    first = ratio(gaussian.allocate(at(0)))
    even = float(size * size / signal.budget)
    flat_first = float((1 / flattened.allocate(at(0)).double()).sum()) / even
    for step in range(40):
        gaussian.learn(at(step), known)
        flattened.learn(at(step), flat)
    source = np.random.default_rng(seed)
    noisy = traces * torch.from_numpy(source.chisquare(2, size) / 2)
    two = Traces(noisy, 2 * torch.ones(size))
    feature = np.tanh(signal.losses.double().numpy())
    angles = np.linspace(-np.pi, np.pi, 1440)
    means = np.cos(angles)[:, None] + np.sin(angles)[:, None] * feature  # (angles, B)
    family = float(objective(values, feasible(means, float(signal.budget), 1.0)).min() / best)
    raw, shrunk = Neyman(pilot=2, shrink=False), Neyman(pilot=2)
    raw.learn(at(0), two)
    shrunk.learn(at(0), two)
    return {
        "equal": ratio(Equal().allocate(at(0))),
        "Bernoulli": statistics.mean(ratio(Bernoulli().allocate(at(s))) for s in range(10)),
        "Gaussian, first step": first,
        "Gaussian, converged": statistics.mean(ratio(gaussian.allocate(at(s))) for s in range(10)),
        "Gaussian, best of family": family,
        "Neyman, 2 queries, raw": ratio(raw.allocate(at(0))),
        "Neyman, 2 queries, shrunk": ratio(shrunk.allocate(at(0))),
        "equal traces, first step": flat_first,
        "equal traces, converged": statistics.mean(
            float((1 / flattened.allocate(at(s)).double()).sum()) / even for s in range(10)
        ),
    }


def run() -> dict[str, Any]:
    """J over the optimum by stage and batch size."""
    train = digits().train
    results: dict[str, Any] = {}
    cells = [(stage, size) for stage in STAGES for size in SIZES]
    known = {
        (stage, seed): measured(
            finetuned(train, STAGES[stage], seed), train, batch(train, max(SIZES), seed)
        )
        for stage, seed in track(
            [(stage, seed) for stage in STAGES for seed in range(SEEDS)],
            description="traces",
            transient=True,
        )
    }
    for stage, size in cells:
        gathered: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            for signal, traces in known[stage, seed]:
                for name, value in over_optimum(part(signal, size), traces[:size], seed).items():
                    gathered.setdefault(name, []).append(value)
        results[f"{stage}, B = {size}: J / J optimal"] = {
            name: statistics.mean(values) for name, values in gathered.items()
        }
    return results
