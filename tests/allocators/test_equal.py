"""Equal counts: those of equal shares, and the same refusal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flops import QueryError
from flops.allocators import Equal, Signal
from flops.allocators.counts import round_counts


def outcome(allocate: Callable[[], Tensor]) -> list[int] | str:
    """Counts, or why there are none."""
    try:
        return allocate().tolist()
    except QueryError as error:
        return str(error)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(0, 200), st.sampled_from([1, 2]), st.integers(0, 3))
def test_counts_are_those_of_equal_shares(size: int, budget: int, unit: int, draws: int) -> None:
    floor = draws * unit
    found = outcome(lambda: Equal().allocate(Signal(torch.rand(size), budget, unit, floor, "g")))
    ones = torch.ones(size)
    assert found == outcome(lambda: round_counts(ones, budget, unit=unit, floor=floor))
