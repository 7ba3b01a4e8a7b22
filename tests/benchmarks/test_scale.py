"""The simulation of many ranks runs on the bundled model, and its cost model adds up."""

from __future__ import annotations

import pytest

from benchmarks import scale
from benchmarks.scale import Measured


def test_a_network_takes_hops_and_bytes() -> None:
    found = Measured(seconds=1.0, messages=3, sent=1e9)
    assert found.network(1, 1e9) == 0
    assert found.network(4, 1e9) == pytest.approx(3 * 4 * 50e-6 + 1.5)
    row = scale.table(Measured(0.9, 0, 0), found)
    assert row["256, 10 Gbit/s"] == pytest.approx(0.9 / (1 + found.network(256, 1.25e9)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_methods_of_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "QUERIES", 8)
    found = scale.run(models=("tiny",), steps=1)
    assert set(found) == {f"tiny, {name}" for name in scale.METHODS}
    mezo, lr = found["tiny, mezo"], found["tiny, lr"]
    assert mezo["MB"] < 0.05 < lr["MB"]  # the sizes of 1,024 batches, and a few sums
    for row in found.values():
        assert row["messages"] > 0
        assert 0 < row["1024, 10 Gbit/s"] <= 1
