"""The benchmarks run on tiny settings, and compare with what they say; nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import fewer, memory, outputs, peers, quality
from benchmarks.floor import Floor
from benchmarks.overhead import CASES, measure, tuned_layers, work
from benchmarks.quality import loss_fn
from benchmarks.rivals import PlainMezo, gradient, rivals, trained
from benchmarks.timing import interleaved, median_and_spread
from flops.tasks.classification import bundled_vit, digits

# Batches of a few points at the benchmarks' sigma: rounding may be felt.
pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    train = digits().train
    return train.images[:6], train.labels[:6]


@pytest.mark.parametrize("name", CASES)
def test_floor_computes_the_clean_losses_of_all_rows(name, batch) -> None:
    case, (x, y) = CASES[name], batch
    model = tuned_layers(case, bundled_vit())
    floor = Floor(model, x, y, case.start, chunk=7)
    with torch.no_grad():
        expected = loss_fn(model(x), y)
    losses, inputs = floor.clean()
    torch.testing.assert_close(losses, expected)
    rows = 0
    for points, found in floor.losses(4, inputs):
        torch.testing.assert_close(found, expected[points])
        rows += len(points)
    assert rows == case.engine(model, 4, chunk=7).estimate(x, y).queries


@pytest.mark.parametrize("name", CASES)
def test_floor_runs_the_same_part_of_the_model(name, batch) -> None:
    case, (x, y) = CASES[name], batch
    model = tuned_layers(case, bundled_vit())
    engine = case.engine(model, 4)
    engine.estimate(x, y)
    charged = engine.estimate(x, y).forward_equivalents.queries
    assert work(Floor(model, x, y, case.start), 4) == pytest.approx(charged, rel=0.01)


@pytest.mark.parametrize("start", ["leaf", "block", "stage"])
def test_floor_takes_a_product_of_every_trained_parameter(start, batch) -> None:
    case = next(case for case in CASES.values() if case.start == start)
    model = tuned_layers(case, bundled_vit())
    floor = Floor(model, *batch, start)
    found = floor.products(floor.clean()[1])
    assert set(found) == {p for p in model.parameters() if p.requires_grad}


def test_overhead_has_a_row(batch) -> None:
    row = measure(CASES["LR, block targets"], bundled_vit(), *batch, repeats=2, warm=0)
    assert row["work"] == pytest.approx(1, rel=0.01)
    assert row["ratio"] > 0


def test_interleaved_runs_all_in_turn() -> None:
    order: list[str] = []
    seconds = interleaved({n: lambda n=n: order.append(n) for n in "ab"}, repeats=2, warm=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [2, 2]
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0])[0] == 3


def test_results_of_other_parts_are_kept(tmp_path) -> None:
    path = tmp_path / "results.json"
    command.write(path, "reuse", {"row": {"ratio": 1.5}}, 1.0)
    command.write(path, "overhead", {"row": {"ratio": 1.1}}, 1.0)
    command.write(path, "overhead", {"row": {"ratio": 1.2}}, 1.0)
    results = json.loads(path.read_text())
    assert results["reuse"]["rows"]["row"]["ratio"] == 1.5
    assert results["overhead"]["rows"]["row"]["ratio"] == 1.2
    assert results["overhead"]["environment"]["threads"] == torch.get_num_threads()


linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


@linux
@pytest.mark.parametrize("case", memory.COMPARED)
def test_memory_measures_every_case(case, monkeypatch) -> None:
    for name, value in (("BATCH", 4), ("CHUNK", 8), ("PIXELS", 16), ("CHANNELS", 64)):
        monkeypatch.setattr(memory, name, value)
    monkeypatch.setattr(memory, "LAYERS", 3)
    found = memory.child(case.replace("200 queries", "3 queries"))
    assert (found["gradient, MB"] > 0) != case.startswith("inference")
    assert found["MB"] >= 0


@linux
def test_peak_sees_what_is_held_for_a_moment() -> None:
    assert memory.peak(lambda: torch.ones(2**24).sum()) > 0.9 * 2**26


def test_plain_loop_and_packages_estimate_the_gradient_by_the_same_passes(batch) -> None:
    """With many draws of few parameters each is close to the exact gradient."""
    model = bundled_vit().requires_grad_(False)
    model.classifier.bias.requires_grad_(True)
    truth = peers.exact(model, *batch)
    calls = peers.Calls(model)
    for name, step in rivals(model, 200).items():
        if step is not None:
            calls.count = 0
            step(*batch)
            assert calls.count in (200, 201), name
            found = gradient(trained(model).values())
            assert torch.cosine_similarity(found, truth, 0) > 0.8, name


def test_plain_loop_moves_against_its_gradient(batch) -> None:
    model = bundled_vit()
    parameter = model.classifier.weight
    before = parameter.detach().clone()
    loop = PlainMezo(model, 1, rate=0.1)
    loop(*batch)
    torch.testing.assert_close(parameter.detach(), before - 0.1 * parameter.grad, atol=1e-5, rtol=0)


def test_ours_never_drifts(batch) -> None:
    found = peers.drift(bundled_vit(), *batch, steps=2)
    assert found["ours: MeZO"] == 0 < found["plain MeZO loop"]


@pytest.mark.slow
def test_engines_of_peers_cost_about_the_same(batch) -> None:
    model = bundled_vit().requires_grad_(False)
    model.vit.layers.requires_grad_(True)
    for name, engine in peers.engines(model, 32).items():
        engine.estimate(*batch)
        cost = engine.estimate(*batch).forward_equivalents / len(batch[1])
        assert cost == pytest.approx(32, rel=0.15), name


@pytest.mark.slow
def test_quality_has_every_estimator_with_every_allocator(monkeypatch) -> None:
    monkeypatch.setattr(quality, "QUERIES", 2)
    monkeypatch.setattr(quality, "BATCH", 4)
    monkeypatch.setattr(quality, "STAGES", {"early": 1})
    monkeypatch.delitem(quality.ALLOCATORS, "Neyman")
    rows = quality.run(warm=1, samples=1)
    assert len(rows) == 7 * 2 + 1
    assert {name for name in quality.TARGETS if f"early: {name}" in rows} == set(quality.TARGETS)
    assert rows[f"early: {quality.BASE}"]["over leaf + equal"] == 1


@pytest.mark.slow
def test_fewer_queries_make_more_steps_at_equal_cost(monkeypatch) -> None:
    monkeypatch.setattr(fewer, "QUERIES", (2, 10))
    monkeypatch.setattr(quality, "BATCH", 4)
    rows = fewer.run(passes=100, seeds=1)
    steps = [row["steps"] for row in rows.values()]
    assert steps[0] > steps[1] > 0
    assert steps[2] > steps[3] > 0


@pytest.mark.parametrize("name", outputs.BOXES)
def test_every_method_learns_from_every_box(name, monkeypatch) -> None:
    monkeypatch.setattr(outputs, "STEPS", 6)
    box = outputs.BOXES[name](32)
    for method in outputs.METHODS:
        assert outputs.end(box, method, 0.03, 0) < box.mean(box.start)
