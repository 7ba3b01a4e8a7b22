"""The rows of `benchmarks real` on the bundled Llama do what they are called; none is timed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from benchmarks import real, real_rows
from benchmarks.real_models import MODELS, Problem
from benchmarks.real_rows import ROWS, BlockFloor, trained
from flops import ForwardGradient, Group, LikelihoodRatio
from flops.passes.flop_count import WorkMeter
from flops.tasks.models import language as models

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")

linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


@pytest.fixture
def tiny() -> Problem:
    return MODELS["tiny"]()


def moved(name: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """How far one step of a row moves each parameter; adapters start at fixed random numbers."""
    monkeypatch.setattr(real_rows, "RATE", rate)
    problem = MODELS["tiny"]()
    torch.manual_seed(1)
    step = ROWS[name].make(problem)
    named = dict(problem.model.named_parameters())
    before = {key: p.detach().clone() for key, p in named.items()}
    step(problem.inputs, problem.targets)
    assert all(p.grad is None for p in named.values()), "gradients are freed"
    changes = {key: p.detach() - before[key] for key, p in named.items()}
    for key, change in changes.items():
        assert named[key].requires_grad or not change.any(), f"{key} is frozen"
    return {key: change for key, change in changes.items() if named[key].requires_grad}


@pytest.mark.parametrize("name", [name for name in ROWS if name != "inference"])
def test_a_step_moves_what_the_row_trains(name, monkeypatch) -> None:
    changes = moved(name, 0.1, monkeypatch)
    still = [key for key, change in changes.items() if not change.any()]
    if "lora" in name:
        assert all("lora_" in key for key in changes)
        assert all("lora_A" in key for key in still), "behind adapters that start at 0"
        assert len(still) == len(changes) / 2
    else:
        assert not still
    layers_alone = all(".layers." in key for key in changes)
    assert layers_alone == (name in ("block", "shaped") or "lora" in name)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bp", "bp-checkpoint"),
        ("bp", "bp-checkpoint-hooks"),
        ("bp-lora", "bp-lora-checkpoint"),
        ("mezo", "mezo-in-place"),
    ],
)
def test_what_saves_memory_changes_nothing_else(name, other, monkeypatch) -> None:
    changes, others = (moved(row, 0.1, monkeypatch) for row in (name, other))
    assert changes.keys() == others.keys()
    for key, change in changes.items():
        torch.testing.assert_close(others[key], change, rtol=1e-4, atol=1e-6)


def test_plain_loop_is_the_algorithm_of_its_paper(tiny, monkeypatch) -> None:
    monkeypatch.setattr(real_rows, "RATE", 0.1)
    reference = copy.deepcopy(tiny.model)
    torch.manual_seed(0)
    noise = [torch.normal(0.0, 1.0, p.shape) for p in reference.parameters()]
    losses = []
    for sign in (1, -1):
        shifted = copy.deepcopy(reference)
        for p, z in zip(shifted.parameters(), noise, strict=True):
            p.add_(sign * real_rows.EPSILON * z)
        losses.append(float(tiny.loss_fn(shifted(tiny.inputs), tiny.targets).mean()))
    slope = (losses[0] - losses[1]) / (2 * real_rows.EPSILON)
    ROWS["mezo-loop"].make(tiny)(tiny.inputs, tiny.targets)
    pairs = zip(tiny.model.parameters(), reference.parameters(), noise, strict=True)
    for p, clean, z in pairs:
        torch.testing.assert_close(p.detach(), clean - 0.1 * slope * z, rtol=1e-3, atol=1e-4)


def test_floor_runs_the_rows_of_block_lr_without_noise(tiny) -> None:
    real_rows.layers_only(tiny)
    floor, x, y = BlockFloor(tiny), tiny.inputs, tiny.targets
    losses = floor.clean(x, y)
    with torch.no_grad():
        torch.testing.assert_close(losses, tiny.loss_fn(tiny.model(x), y))
    rows = 0
    for points, found in floor.losses(y, 4):
        torch.testing.assert_close(found, losses[points])
        rows += len(points)
    assert set(floor.products()) == set(trained(tiny.model))
    groups = [Group(part, LikelihoodRatio(), 4) for part in tiny.parts()]
    report = ForwardGradient(tiny.model, tiny.loss_fn, groups).estimate(x, y)
    assert rows == report.queries
    with torch.no_grad(), WorkMeter(lambda _: None) as whole:
        tiny.loss_fn(tiny.model(x), y)
    with WorkMeter(lambda _: None) as meter:
        for _ in floor.losses(y, 4, torch.no_grad):
            pass
    charged = report.forward_equivalents.queries / len(y)
    assert meter.total / whole.total == pytest.approx(charged, rel=0.01)


@pytest.mark.parametrize("name", ROWS)
def test_cost_of_every_row(name, monkeypatch) -> None:
    monkeypatch.setattr(real_rows, "QUERIES", 2)
    found = real.seconds_of("tiny", name, steps=1)
    row = ROWS[name]
    probed = name.startswith(("mezo", "block", "shaped", "default")) and name != "mezo-loop"
    assert ("probing" in found) == probed
    assert found.get("in turn with") == row.beside
    work = {"inference": 1, "mezo-loop": 2, "mezo": 2, "mezo-in-place": 2, "bp": 3}
    if name in work:
        assert found["passes of work"] == pytest.approx(work[name], rel=0.2)


# One of each kind of memory; what a step moves and costs is tested of every row.
MEASURED = ("inference", "bp", "mezo", "block", "shaped", "shaped-lora")


@linux
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in MEASURED else pytest.mark.slow) for n in ROWS]
)
def test_memory_of_every_row(name, monkeypatch) -> None:
    monkeypatch.setattr(real_rows, "QUERIES", 2)
    found = real.memory_of("tiny", name)
    model = MODELS["tiny"]().model
    sizes = {key: p.numel() / 1e6 for key, p in model.named_parameters()}
    expected = sum(sizes.values())
    if name in ("block", "shaped"):
        expected = sum(size for key, size in sizes.items() if ".layers." in key)
    elif name == "inference":
        expected = 0
    elif "lora" in name:
        expected = sum(
            real_rows.RANK * (m.in_features + m.out_features) / 1e6
            for m in model.model.layers.modules()
            if isinstance(m, torch.nn.Linear)
        )
    assert found["trained, M"] == pytest.approx(expected)
    assert found["growth, MB"] >= found["adds, MB"] >= found["first adds, MB"]


@linux
@pytest.mark.slow
def test_rows_run_in_processes_of_their_own_and_failures_are_told(capsys) -> None:
    results = real.run(("bp", "nothing"), ("tiny",), what=("memory",))
    assert results["tiny: bp"]["adds / bp"] == 1
    assert "passes" not in results["tiny: bp"]
    assert results["tiny: nothing"] == {"failed": "KeyError: 'nothing'"}
    printed = capsys.readouterr().out
    assert "tiny, bp: grows by" in printed
    assert "tiny, nothing: failed: KeyError" in printed
    table = real.markdown(results)
    assert "| bp | 0." in table
    assert "tiny: nothing: KeyError" in table


def test_a_model_that_is_not_there_names_the_remedy(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(models, "SMOLLM2", "no_such_package")
    monkeypatch.setattr(models, "REAL_MODELS", tmp_path)
    results = real.run(("inference",), ("smollm2-48",))
    assert "make real-models" in results["smollm2-48"]["not measured"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert "make real-models" in printed[0]


def test_ratios_are_to_rows_of_the_same_run() -> None:
    rows = {
        "bp": {"passes": 3.0, "growth, MB": 100.0, "adds, MB": 80.0},
        "shaped": {"passes": 30.0, "growth, MB": 40.0, "adds, MB": 20.0},
        "block": {"failed": "MemoryError"},
    }
    real.compare(rows)
    assert rows["shaped"]["time / bp"] == 10
    assert rows["shaped"]["growth / bp"] == 0.4
    assert rows["shaped"]["adds / bp"] == 0.25
    assert "time / bp-lora" not in rows["shaped"]
    assert rows["block"] == {"failed": "MemoryError"}
