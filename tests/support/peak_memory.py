"""Bytes that tensors hold, counted by torch's allocator events: nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


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
