"""What alignment must reach: the embedded models over three seeds, and SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import align, align_cost, align_gradient
from flops.tasks.alignment.config import PRESETS, AlignConfig
from flops.tasks.alignment.models import smollm2_file
from flops.training.loop import train

pytestmark = pytest.mark.slow
CHANCE = 0.1  # of ten classes


def has_smollm2() -> bool:
    try:
        return smollm2_file().is_file()
    except FileNotFoundError:
        return False


needs_smollm2 = pytest.mark.skipif(not has_smollm2(), reason="run `make real-models` first")


def test_forward_methods_reduce_the_loss_almost_as_backpropagation_does(tmp_path: Path) -> None:
    found = align.run(folder=tmp_path)
    assert found["shaped-lr"]["of bp's reduction"] >= 0.95
    assert found["ops-lr"]["of bp's reduction"] >= 0.80
    for method in ("shaped-lr", "ops-lr"):
        assert found[method]["loss"] < found["ops-spsa"]["loss"]
        assert found[method]["caption accuracy"] > 0.6
    for method in align.CONTROLS:
        assert found[f"{method}, shuffled"]["caption accuracy"] < 2.5 * CHANCE
    assert (tmp_path / "align.png").is_file()


def test_orthogonal_noise_sees_more_and_all_of_it_with_enough_queries() -> None:
    found = align_gradient.run()
    for queries in align_gradient.QUERIES:
        name = f"{queries} queries"
        assert found["orthogonal"][name] > found["gaussian"][name]
    assert found["orthogonal"]["64 queries"] > 0.99


@needs_smollm2
def test_smollm2_takes_less_than_half_of_the_memory_of_backpropagation() -> None:
    def growth(method: str) -> float:  # on a busy machine, pages of other threads add a tenth
        return min(align_cost.memory("smollm2", method)["step adds, MB"] for _ in range(2))

    assert growth("ops-lr") < 0.5 * growth("bp")


@needs_smollm2
def test_smollm2_learns_what_it_is_shown() -> None:
    """One epoch with 60 queries: 11 minutes on two idle cores. The control backpropagates."""
    config = AlignConfig(**PRESETS["smollm2"])
    aligned = train(config)
    control = train(config.replace(method="bp", shuffled=True))
    assert aligned.accuracy > 2.5 * CHANCE  # 37 % when it was measured
    assert aligned.accuracy > control.accuracy + 0.1
    losses = [e.loss for e in aligned.evaluations]
    assert losses[-1] < losses[0]
