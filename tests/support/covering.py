"""Products of parameters of which a part runs always, the rest with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_turn(
    names: Iterable[Any], values: Collection[Any], step: int = 0, full: Collection[Any] = ()
) -> list[Any]:
    """All pairs; those that run always have every name and every value at least once.

    Args:
        names: First of each pair.
        values: Second of each pair.
        step: Every so many values runs; 0 for one of them.
        full: Names that run with all values.
    """
    step, names = step or len(values), list(names)
    assert len(names) >= step or full, "a value would only run with the slow tests"
    return [
        pytest.param(
            name, value, marks=() if name in full or (i + j) % step == 0 else pytest.mark.slow
        )
        for i, name in enumerate(names)
        for j, value in enumerate(values)
    ]
