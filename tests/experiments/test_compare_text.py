"""Comparisons on texts: variants of methods, the unmodified model, steps, a curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flops.cli.compare import TEXT_METHODS, TEXT_PRESETS, CompareText
from flops.cli.main import main
from flops.errors import FlopsError
from flops.experiments.compare import cost_of_length
from flops.experiments.compare_methods import Variant, variant
from flops.experiments.compare_runs import MethodComparison, TextComparisonRun, measure
from flops.experiments.compare_sweep import Tried, sweep
from flops.experiments.compare_tables import compared_pairs, differences, sentence, table
from flops.passes.ranks import Ranks
from flops.report.names import METHOD_NAMES
from flops.tasks.text import Text, TextConfig
from flops.training.methods import METHODS

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
BASE = TextConfig(limit=24, batch=8, queries=2)


def study(folder: Path, *methods: str, **changed: Any) -> MethodComparison:
    given: dict[str, Any] = {
        "methods": methods, "seeds": 1, "length": 3, "budget": None, "learning_rates": (1e-3,),
        "sigmas": (1e-3,), "sweep_length": 1, "base": BASE, "folder": folder, "workers": 0,
        "console": Console(quiet=True), "lora": 2,
    }  # fmt: skip
    return MethodComparison(**{**given, **changed})


def test_methods_are_spelled_with_what_they_train() -> None:
    assert variant("shaped-lr") == Variant("shaped-lr")
    assert variant("bp+lora") == Variant("bp", lora=True)
    assert variant("mezo+all") == Variant("mezo", everything=True)
    assert variant("lr+lora+last12") == Variant("lr", lora=True, last=12)
    assert variant("zero-shot") == Variant(None)
    assert [variant(m).forward for m in ("zero-shot", "bp", "bp+lora", "mezo")] == [
        False,
        False,
        False,
        True,
    ]
    assert all(variant(m).name == m for m in METHODS)
    for wrong in ("sgd", "bp+", "bp+adapter", "zero-shot+lora", "mezo+last0", "mezo+all+lora", ""):
        with pytest.raises(FlopsError, match=f"no method '{wrong}'".replace("+", r"\+")):
            variant(wrong)


def test_every_wanted_method_that_there_is_is_a_default() -> None:
    assert TEXT_METHODS[0] == "zero-shot"
    assert {"bp", "bp+lora", "mezo", "lr", "ops-lr", "shaped-lr", "shaped-lr+lora"} <= {
        *TEXT_METHODS
    }
    for name in ("fzoo", "lozo"):
        assert (name in TEXT_METHODS) == (name in METHODS)


def test_a_variant_is_a_training_configuration(tmp_path: Path) -> None:
    base = BASE.replace(train_last=2)

    def config(method: str) -> TextConfig:
        found = study(tmp_path, method, base=base).run(method, 1e-3, 1e-2).config()
        assert isinstance(found, TextConfig)
        return found

    assert (config("lr").train_last, config("lr").lora) == (2, None)
    assert (config("lr+lora").train_last, config("lr+lora").lora) == (2, 2)
    assert (config("lr+all").train_last, config("lr+last1").train_last) == (None, 1)
    assert (config("bp").sigma, config("mezo+lora").sigma) == (None, (1e-2,))
    assert (config("lr").epochs, config("lr").steps, config("lr").until) == (None, 3, "last")


def test_zero_shot_is_the_unmodified_model(tmp_path: Path) -> None:
    run = study(tmp_path, "zero-shot").reported("zero-shot", 1e-3, 1e-3, seed=0)
    found = measure(run)
    task = Text(BASE, torch.device("cpu"))
    accuracy, loss = task.measure(task.data.validation, Ranks())
    assert found["at_steps"] == found["at_budget"]
    assert (found["at_steps"]["accuracy"], found["at_steps"]["loss"]) == (accuracy, loss)
    assert found["at_steps"]["test"] == task.measure(task.data.test, Ranks())[0]
    assert found["at_steps"]["forward_equivalents"] == 0


@pytest.mark.parametrize("batch", [4, 64])  # the last batch of an epoch is smaller; the only one
def test_the_budget_is_what_the_steps_cost(batch: int, tmp_path: Path) -> None:
    base = TextConfig(limit=9, batch=batch, queries=2)
    chosen = study(tmp_path, "lr", base=base, length=4)
    cost = cost_of_length(chosen, "lr")
    found = measure(chosen.run("lr", 1e-3, 1e-3, budget=cost))
    spent = found["at_steps"]["forward_equivalents"]
    assert spent <= cost <= 1.05 * spent


def test_a_run_has_a_curve_over_its_budget_and_a_test_at_its_ends(tmp_path: Path) -> None:
    chosen = study(tmp_path, "mezo")
    cost = cost_of_length(chosen, "lr")
    run = study(tmp_path, "mezo", budget=cost).reported("mezo", 1e-3, 1e-3, seed=0)
    assert isinstance(run, TextComparisonRun)
    found = measure(run)
    marks = [mark for e in found["curve"] for mark in e["marks"]]
    shares = [f"budget {cost * i / 5:.12g}" for i in range(1, 6)]
    assert sorted(marks) == sorted(["step 3", *shares])
    costs = [e["forward_equivalents"] for e in found["curve"]]
    assert costs == sorted(costs)
    assert [e["step"] for e in found["curve"] if e["test"] is not None] == [
        3,
        found["at_budget"]["step"],
    ]
    assert found["at_steps"]["step"] == 3 < found["at_budget"]["step"]
    assert 0.8 * cost < found["at_budget"]["forward_equivalents"] <= cost


def test_a_sweep_of_texts_is_short_and_in_steps(tmp_path: Path) -> None:
    seen: list[TextComparisonRun] = []

    def tries(given: Any, method: str, part: str, runs: dict[Any, Any]) -> tuple[Any, ...]:
        seen.extend(runs.values())
        return ()

    chosen = study(tmp_path, "lr", budget=300.0, learning_rates=(1e-3, 1e-2))
    with pytest.raises(IndexError):  # nothing was tried
        sweep(chosen, "lr", tries)
    assert {(run.steps, run.budget, run.curve, run.test) for run in seen} == {(1, 100.0, 0, False)}
    skipped = sweep(chosen, "zero-shot", tries)
    assert skipped.tried == ()


def test_sigma_is_swept_only_where_it_is_not_automatic(tmp_path: Path) -> None:
    chosen = study(
        tmp_path, "lr", "shaped-lr", budget=300.0, sigmas=(1e-2, 1e-3), learning_rates=(1e-3, 1e-4)
    )
    swept: dict[str, list[float | None]] = {}

    def tries(study: Any, method: str, part: str, runs: Any) -> tuple[Tried, ...]:
        if part == "sweep":
            swept[method] = [run.sigma for run in runs.values()]
        return tuple(Tried(*pair, 0.5, 0.5) for pair in runs)

    for method in ("lr", "shaped-lr"):
        sweep(chosen, method, tries)
    assert swept == {"lr": [1e-2, 1e-3, 1e-2, 1e-3], "shaped-lr": [None, None]}


def test_every_method_has_a_name_for_people() -> None:
    assert set(METHODS) <= set(METHOD_NAMES)


def test_a_comparison_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "compare", "--task", "text", "--output", str(tmp_path), "--methods", "zero-shot", "bp",
        "bp+lora", "mezo", "shaped-lr+lora", "--seeds", "2", "--steps", "2", "--limit", "16",
        "--batch", "8", "--queries", "2", "--workers", "0", "--learning-rates", "1e-3",
        "--sigmas", "1e-3",
    ]  # fmt: skip
    main(given)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Equal cost" in shown
    assert "Equal steps: 2" in shown
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["steps"] == 2
    assert list(kept["results"]) == ["zero-shot", "bp", "bp+lora", "mezo", "shaped-lr+lora"]
    for method, found in kept["results"].items():
        for one in found:
            assert one["at_budget"]["test"] is not None
            assert one["at_steps"]["step"] == (0 if method == "zero-shot" else 2)
            assert one["peak_memory"] > 0
    assert kept["results"]["mezo"][0]["at_budget"]["step"] > 2
    written = (tmp_path / "tables.md").read_text()
    assert "| shaped-lr+lora | stage |" in written
    assert "| zero-shot | - |" in written
    assert "| shaped-lr+lora - bp | equal steps |" in written
    assert "| shaped-lr+lora - mezo | equal cost |" in written
    assert (tmp_path / "accuracy.png").stat().st_size > 5000
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").rglob("*.json")}
    assert len(before) == 10
    main(given)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").rglob("*.json")} == before


def test_tables_and_the_sentence_speak_of_steps() -> None:
    def result(test: float) -> dict[str, Any]:
        at = {"test": test, "step": 40, "epoch": 1.0, "queries": 10, "forward_equivalents": 10.0}
        at |= {"seconds": 1.0}
        return {"at_budget": at, "at_steps": at, "peak_memory": 2**20}

    results = {
        "zero-shot": [result(0.5), result(0.5)],
        "bp": [result(0.9), result(0.92)],
        "shaped-lr": [result(0.8), result(0.9)],
    }
    sheet = table(results, "at_steps", "title", "note", unit="steps")
    assert sheet.header[3] == "steps"
    assert sheet.rows[2][3] == "40"
    assert compared_pairs(list(results), "at_steps") == [
        ("shaped-lr", "zero-shot", "at_budget"),
        ("shaped-lr", "bp", "at_steps"),
    ]
    found = differences(results, "at_steps")
    assert found is not None
    assert [row[:2] for row in found.rows] == [
        ("shaped-lr - zero-shot", "equal cost"),
        ("shaped-lr - bp", "equal steps"),
    ]
    said = sentence(results, 40, "steps")
    assert "shaped-lr 85.0 %; after 40 steps shaped-lr is 6.0 points below" in said
    assert sentence({"zero-shot": results["zero-shot"]}, 40, "steps").startswith(
        "zero-shot reached"
    )


def test_options_of_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, preset in TEXT_PRESETS.items():
        CompareText(**{**preset, "preset": name})
    with pytest.raises(SystemExit):
        main(["compare", "--task", "text", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "$ flops compare --task text --preset smollm2" in shown
    with pytest.raises(SystemExit, match="no method 'sgd'"):
        main(["compare", "--task", "text", "--methods", "sgd", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="steps, sweep-steps, curve, lora must be at least 1"):
        main(["compare", "--task", "text", "--steps", "0"])
    with pytest.raises(SystemExit, match="preset must be one of tiny, smollm2, not 'huge'"):
        main(["compare", "--task", "text", "--preset", "huge"])
