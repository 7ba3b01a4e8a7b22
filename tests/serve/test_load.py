"""Many clients at once: every answer arrives, nothing but 429 is refused, memory stays bounded."""

from __future__ import annotations

import pytest

from benchmarks.service import measure


def correct(found: dict[str, float]) -> None:
    assert found["errors"] == 0
    assert found["charged, not received"] == 0
    assert found["requests"] > 0
    assert found["ratio"] > 0
    assert found["MB, last"] - found["MB, first"] < 100


@pytest.mark.slow
def test_a_short_load_has_no_errors() -> None:
    correct(measure(clients=16, seconds=2.0, rows=4))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_sixty_four_clients_have_no_errors(rows) -> None:
    correct(measure(clients=64, seconds=60.0, rows=rows))
