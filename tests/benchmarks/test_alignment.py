"""The benchmarks of alignment on tiny settings; nothing here is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import align, align_cost, align_gradient
from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.figures import AlignedRun, read_run

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")


@pytest.mark.slow
def test_methods_side_by_side_and_again_from_what_is_kept(tmp_path: Path, monkeypatch) -> None:
    base = AlignConfig(limit=10, batch=25, queries=4, epochs=2)
    found = align.run(1, base, tmp_path)
    assert set(found) == {*align.METHODS, "bp, shuffled", "shaped-lr, shuffled"}
    assert found["bp"]["of bp's reduction"] == 1
    assert (tmp_path / "align.png").stat().st_size > 1000
    monkeypatch.setattr("benchmarks.align.train", lambda *_, **__: pytest.fail("it was run again"))
    assert align.run(1, base, tmp_path) == found
    run = read_run(tmp_path / "ops-lr-seed0")
    assert run.steps == (0, 2, 4)
    assert len(run.losses) == len(run.seconds) == 3


def test_time_to_a_loss_goes_straight_from_evaluation_to_evaluation() -> None:
    run = AlignedRun(
        1.0, 0.2, 0.5, None, 1.0, (0, 5, 9), (1.0, 0.4, 0.2), (0.0, 6.0, 8.0), (0, 60, 90)
    )
    assert run.to_loss(0.7) == pytest.approx((3.0, 30.0))
    assert run.to_loss(0.3) == pytest.approx((7.0, 75.0))
    assert run.to_loss(0.1) is None
    assert run.to_loss(1.5) == (0.0, 0)


@pytest.mark.slow
def test_gradients_and_costs() -> None:
    found = align_gradient.run(steps=1, batches=1, limit=10)
    assert found["orthogonal"]["64 queries"] > max(0.98, found["gaussian"]["64 queries"])
    costs = align_cost.run(repeats=1, methods=("bp", "lr"), queries=2)
    assert costs["lr"]["over lr"] == 1
    assert costs["bp"]["step adds, MB"] > 0
