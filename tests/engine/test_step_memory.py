"""Memory does not grow with the number of queries, and no noise is kept for a whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flops import SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.estimators.shared_parameters import KEEP
from flops.presets import mezo
from tests.conftest import squared


def peak(run: Callable[[], object]) -> int:
    """Most bytes that tensors held at once while running, beyond those before."""
    run()  # structure and caches
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most


def stack(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@pytest.mark.parametrize(
    "estimator", [LikelihoodRatio(), LikelihoodRatio(targets="leaf"), SPSA(), SPSA(shared=True)]
)
def test_memory_does_not_grow_with_queries(estimator) -> None:
    model = stack(64, 4)
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def step(queries: int) -> Callable[[], object]:
        groups = [Group(model, estimator, queries=queries)]
        fg = ForwardGradient(model, squared, groups, chunk=64)

        def run() -> None:
            model.zero_grad()
            fg.estimate(x, y)

        return run

    few, many = peak(step(20)), peak(step(200))
    assert many < 1.05 * few + 200_000  # the plan's own rows: some dozen bytes per query


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_mezo_holds_the_noise_of_one_module() -> None:
    """Beyond inference and the gradient itself there is room for one layer's noise, not for all."""
    width, layers = 512, 20
    model = stack(width, layers)
    assert sum(p.numel() for p in model.parameters()) > KEEP  # else all of it may be kept
    x, y = torch.randn(4, width), torch.randn(4, width)
    fg = ForwardGradient(model, squared, mezo(model))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        fg.estimate(x, y)

    layer = 4 * width * width
    whole = layers * layer
    inference = peak(lambda: squared(model(x), y))
    assert peak(run) < inference + whole + 4 * layer
