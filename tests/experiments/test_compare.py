"""Comparisons: marks, sweep, tables, and a rerun that reads what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flops.cli.main import main
from flops.experiments.compare import cost_of_length
from flops.experiments.compare_runs import ComparisonRun, MethodComparison, measure
from flops.experiments.compare_sweep import SWEEP_SEED, Chosen, Tried, sweep
from flops.experiments.compare_tables import above, differences, sentence, sweep_table, table
from flops.tasks.classification.config import FinetuneConfig
from flops.training.methods import MethodName

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")


def run(output: Path, *more: str) -> None:
    main(
        [
            "compare", "--output", str(output), "--methods", "bp", "lr", "shaped-lr",
            "--seeds", "2", "--epochs", "1", "--limit", "64", "--batch", "32", "--queries", "2",
            "--workers", "0", "--learning-rates", "1e-3", "--sigmas", "1e-3", *more,
        ]
    )  # fmt: skip


def evaluation(test: float, cost: float) -> dict[str, Any]:
    return {
        "test": test,
        "accuracy": test,
        "epoch": 8.0,
        "queries": 1000,
        "forward_equivalents": cost,
        "seconds": 3.0,
    }


def result(budget: float, epochs: float) -> dict[str, Any]:
    found = {"at_budget": evaluation(budget, 2e6), "at_epochs": evaluation(epochs, 3e5)}
    return {**found, "curve": list(found.values()), "peak_memory": 2**30}


def test_a_comparison_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    shown = capsys.readouterr().out
    assert "Equal cost" in shown
    assert "Equal epochs" in shown
    assert "At equal cost the forward methods reach" in " ".join(shown.split())
    kept = json.loads((tmp_path / "results.json").read_text())
    budget = kept["budget"]
    for method, found in kept["results"].items():
        assert len(found) == 2
        for one in found:
            a, b = one["at_budget"], one["at_epochs"]
            assert f"budget {budget:.12g}" in a["marks"]
            assert "epoch 1" in b["marks"]
            assert b["epoch"] == 1
            assert 0.8 * budget < a["forward_equivalents"] <= budget, method
            assert a["forward_equivalents"] >= b["forward_equivalents"]
            assert a["test"] is not None
            assert all(e["test"] is None for e in one["curve"] if e not in (a, b))
    bp = kept["results"]["bp"][0]
    assert bp["at_budget"]["epoch"] > 2  # cheaper steps: more of them
    assert (tmp_path / "accuracy.png").stat().st_size > 5000
    assert f"plot: {tmp_path / 'accuracy.png'}" in shown
    assert "| shaped-lr | stage |" in (tmp_path / "tables.md").read_text()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").rglob("*.json")}
    assert len(before) == 6
    run(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").rglob("*.json")} == before


def test_the_sweep_looks_at_validation_only(tmp_path: Path) -> None:
    run(tmp_path, "--methods", "bp", "--learning-rates", "1e-2", "1e-7", "--seeds", "1")
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["chosen"]["bp"]["learning_rate"] == 1e-2
    assert len(kept["chosen"]["bp"]["tried"]) == 2
    swept = [json.loads(p.read_text()) for p in (tmp_path / "cells/sweep").glob("*.json")]
    assert len(swept) == 2
    for one in swept:
        assert one["settings"]["seed"] == SWEEP_SEED
        assert all(e["test"] is None for e in one["result"]["curve"])


def test_settings_are_chosen_by_runs_in_full(tmp_path: Path) -> None:
    """Of the two best rates of the short runs, the one that is better in the end."""
    seen: list[ComparisonRun] = []
    short = {1e-3: 0.5, 3e-3: 0.8, 1e-2: 0.75, 3e-2: None}
    full = {3e-3: (0.6, 0.4), 1e-2: (0.9, 0.3), 1e-3: (None, 0.7)}

    def tried(
        study: MethodComparison, method: str, part: str, runs: dict[Any, ComparisonRun]
    ) -> tuple[Tried, ...]:
        seen.extend(runs.values())
        if part == "sweep":  # at equal epochs the lowest rate is the second best
            return tuple(Tried(*p, short[p[0]], 0.9 if p[0] == 1e-3 else short[p[0]]) for p in runs)
        return tuple(Tried(*pair, *full[pair[0]]) for pair in runs)

    rates = tuple(short)
    quiet = Console(quiet=True)
    study = MethodComparison(
        ("lr",), 1, 4, 1e4, rates, (1e-3,), 1, FinetuneConfig(), tmp_path, 0, quiet
    )
    chosen = sweep(study, "lr", tried)
    assert (chosen.learning_rate, chosen.epochs_rate) == (1e-2, 1e-3)
    finals = {run.learning_rate: run.budget for run in seen[4:]}
    assert finals == {3e-3: 1e4, 1e-2: 1e4, 1e-3: None}
    assert all(run.seed == SWEEP_SEED and not run.test for run in seen)
    assert {(run.epochs, run.budget) for run in seen[:4]} == {(1, 2500.0)}


def test_a_setting_that_is_far_ahead_needs_no_run_in_full(tmp_path: Path) -> None:
    scores = {1e-3: 0.5, 3e-3: 0.8}

    def tried(
        study: MethodComparison, method: str, part: str, runs: dict[Any, ComparisonRun]
    ) -> tuple[Tried, ...]:
        assert part == "sweep"
        return tuple(Tried(*pair, scores[pair[0]], scores[pair[0]]) for pair in runs)

    quiet = Console(quiet=True)
    study = MethodComparison(
        ("lr",), 1, 4, 1e4, tuple(scores), (1e-3,), 1, FinetuneConfig(), tmp_path, 0, quiet
    )
    chosen = sweep(study, "lr", tried)
    assert (chosen.learning_rate, chosen.epochs_rate, chosen.finals) == (3e-3, 3e-3, ())


def test_each_table_has_the_run_that_was_tuned_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flops.experiments.compare.sweep", lambda *_: Chosen(1e-3, 1e-3, 1e-2, 1e-3)
    )
    run(tmp_path, "--methods", "bp", "--seeds", "1", "--budget", "800")
    (found,) = json.loads((tmp_path / "results.json").read_text())["results"]["bp"]
    runs = [json.loads(p.read_text()) for p in (tmp_path / "cells/runs").glob("*.json")]
    by_rate = {one["settings"]["learning_rate"]: one["result"] for one in runs}
    assert found["at_budget"] == by_rate[1e-3]["at_budget"]
    assert found["at_epochs"] == by_rate[1e-2]["at_epochs"]
    assert "at_budget" not in by_rate[1e-2]
    assert sum(e["test"] is not None for e in by_rate[1e-2]["curve"]) == 1


@pytest.mark.slow
def test_targets_can_be_chosen_and_older_results_are_still_read(tmp_path: Path) -> None:
    options = ("--methods", "lr", "--seeds", "1", "--targets", "block")
    run(tmp_path, *options)
    assert "| lr | block |" in (tmp_path / "tables.md").read_text()
    (cell,) = (tmp_path / "cells/runs").glob("*.json")
    kept = json.loads(cell.read_text())
    assert kept["settings"]["targets"] == "block"
    run(tmp_path, "--methods", "lr", "--seeds", "1")
    (other,) = {*(tmp_path / "cells/runs").glob("*.json")} - {cell}
    kept = json.loads(other.read_text())
    del kept["settings"]["targets"]  # as written before there was such a setting
    other.write_text(json.dumps(kept))
    before = other.stat().st_mtime_ns
    run(tmp_path, "--methods", "lr", "--seeds", "1")
    assert other.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_comparison_can_start_from_a_model_that_knows_its_task(tmp_path: Path) -> None:
    start = str(tmp_path / "start")
    training = ("--epochs", "8", "--limit", "64", "--seed", "5")  # a head that no run draws again
    main(["finetune", "--method", "bp", *training, "--output", start])
    knows = ("--model", f"{start}/model", "--seeds", "1", "--learning-rates", "1e-6")
    run(tmp_path / "kept", *knows, "--head", "kept")
    run(tmp_path / "fresh", *knows)
    kept, fresh = (
        json.loads((tmp_path / name / "results.json").read_text())["results"]["lr"][0]
        for name in ("kept", "fresh")
    )
    assert kept["at_epochs"]["test"] > 0.4 > 0.3 > fresh["at_epochs"]["test"]


@pytest.mark.parametrize(
    "command", ["compare", "diagnose", "study gradients", "study robustness", "study shaped"]
)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert f"$ flops {command}" in capsys.readouterr().out


def test_no_method_twice(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="different methods"):
        run(tmp_path, "--methods", "bp", "bp")


@pytest.mark.parametrize(
    "bad", [("--seeds", "0"), ("--epochs", "0"), ("--learning-rates",), ("--sweep-epochs", "0")]
)
def test_bad_settings_are_refused_at_once(bad: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="at least"):
        run(tmp_path, *bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("--learning-rates", "1e-3", "-1"), "learning_rate must be greater than 0, not -1"),
        (("--sigmas", "1e-3", "0"), "sigma must be greater than 0"),
        (("--budget", "0"), "budget must be greater than 0"),
        (("--methods", "bp", "deepzero", "--queries", "auto"), "those of deepzero are shared"),
    ],
)
def test_every_setting_is_looked_at_before_the_first_run(
    bad: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    absent = ("--model", "nowhere")  # whoever loads it fails
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, *bad, *absent)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match="cannot write to"):
        run(tmp_path / "file", *absent)


def test_a_setting_that_diverges_is_only_a_bad_one(tmp_path: Path) -> None:
    run(tmp_path, "--methods", "bp", "--learning-rates", "1e30", "1e-3", "--seeds", "1")
    chosen = json.loads((tmp_path / "results.json").read_text())["chosen"]["bp"]
    assert chosen["learning_rate"] == 1e-3
    nothing = {"cost": None, "epochs": None}
    assert chosen["tried"][0] == {"learning_rate": 1e30, "sigma": 1e-3, **nothing}


def test_tables_say_what_was_seen() -> None:
    results: Any = {
        "bp": [result(0.95, 0.96), result(0.97, 0.98)],
        "lr": [result(0.5, 0.4), result(0.6, 0.5)],
        "ops-lr": [result(0.7, 0.6), result(0.82, 0.7)],
    }
    sheet = table(results, "at_budget", "title", "note")
    assert sheet.rows[1][:3] == ("lr", "leaf", "55.0 ± 7.1")
    assert sheet.rows[0][1] == "-"
    assert "2M" in sheet.rows[0]
    assert "1024" in sheet.rows[0]
    found = differences(results)
    assert found is not None
    (row,) = found.rows
    assert row == ("ops-lr - lr", "equal cost", "+21.0 ± 12.7")
    said = sentence(results, 8)
    assert "ops-lr 76.0, lr 55.0 %" in said
    assert "ops-lr is 32.0 points below backpropagation" in said


def test_methods_above_the_budget_are_named() -> None:
    results: Any = {"bp": [result(0.9, 0.9)], "lr": [result(0.5, 0.5)]}
    assert above(results, 2e6) == ""
    results["lr"][0]["at_budget"] = evaluation(0.5, 3e6)
    assert "Above the budget" in above(results, 2e6)
    assert "lr (3,000,000)" in above(results, 2e6)
    assert "bp" not in above(results, 2e6)


def test_one_seed_has_no_differences_and_no_sweep_no_table() -> None:
    assert differences({"lr": [result(0.5, 0.5)], "mezo": [result(0.1, 0.1)]}) is None
    assert sweep_table({}) is None


def test_a_run_is_a_training_configuration() -> None:
    run = ComparisonRun("bp", 1e-3, None, 2, 1e4, "tiny-vit", "digits", 20, 64, test=True, seed=3)
    config = run.config()
    assert (config.until, config.seed, config.test, config.output) == ("last", 3, True, None)


@pytest.mark.parametrize(
    ("method", "batch", "steps"),
    [
        ("lr", 3, (6, 7)),  # a step is cheap beside the tracing
        ("lr", 64, (2,)),  # more than all points
        # DeepZero's pruning alone takes 2,328 passes before the first step.
        pytest.param("deepzero", 3, (6, 7), marks=pytest.mark.slow),
    ],
)
def test_the_budget_is_what_the_epochs_cost_also_after_a_dear_first_step(
    method: MethodName, batch: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    base = FinetuneConfig(limit=9, batch=batch, queries=4)
    study = MethodComparison(
        (method,), 1, 2, None, (1e-3,), (1e-3,), 1, base, tmp_path, 0, Console(quiet=True)
    )
    cost = cost_of_length(study, method)
    found = measure(study.run(method, 1e-3, 1e-3, budget=cost))
    spent = found["at_epochs"]["forward_equivalents"]
    assert spent <= cost <= 1.05 * spent
    assert found["at_budget"]["step"] in steps
