"""The study of shaped noise: runs, tables and plots that are written, and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flops.cli.main import main
from flops.cli.study import Shaped
from flops.experiments import shaped, shaped_tables
from flops.experiments.shaped_problems import PROBLEMS, Comparison, compare
from flops.experiments.shaped_text import TextRun, running, text_sheet, train_text
from flops.experiments.shaped_training import (
    TrainingRun,
    cost_to_reach,
    mean_cosines,
    steps_above,
    train,
)
from flops.training.methods import MethodName


@pytest.mark.slow
def test_updates_along_the_exact_gradient_are_those_of_backpropagation() -> None:
    both = [
        train(TrainingRun(method, queries=2, every=2, follow="exact", most=3, seed=1))
        for method in ("shaped", "backpropagation")
    ]
    assert both[0]["losses"] == pytest.approx(both[1]["losses"], rel=1e-5)
    assert both[0]["validation loss"] == pytest.approx(both[1]["validation loss"], rel=1e-5)
    assert both[0]["steps"] == [0, 2]
    assert both[0]["test"] is None
    assert both[1]["forward equivalents"] == 3 * 3 * 64


def test_mean_cosines_leave_out_the_first_steps() -> None:
    result = {"steps": [0, 4, 8], "cosines": [[9.0, 9.0], [1.0, 2.0], [3.0, 4.0]]}
    assert mean_cosines(result, 4) == [2, 3]


def test_the_cost_to_reach_an_accuracy_is_that_of_two_epochs() -> None:
    curve = [(0.0, 0.1), (10.0, 0.95), (20.0, 0.89), (30.0, 0.93)]
    assert cost_to_reach({"curve": curve}, 0.9) == 20
    assert cost_to_reach({"curve": curve}, 0.5) == 10
    assert cost_to_reach({"curve": curve}, 0.97) is None


def test_the_first_step_above_a_cosine_is_followed_by_another() -> None:
    result = {"steps": [0, 4, 8, 12], "cosines": [[0.9], [0.7], [0.85], [0.9]]}
    assert steps_above(result, 0, 0.8) == 8
    assert steps_above(result, 0, 0.95) is None


@pytest.mark.slow
def test_costs_and_defaults_are_ratios_to_backpropagation(tmp_path: Path) -> None:
    study = Shaped(seeds=1, workers=0, most=1, output=tmp_path).study()
    shaped.main(("cost", "defaults"), study)
    rows = json.loads((tmp_path / "defaults.json").read_text())[0]["rows"]
    assert [row[0] for row in rows] == ["backpropagation", "nothing set", "the paper's"]
    assert rows[0][2].startswith("1.0")
    assert float(rows[1][2].split()[0]) > 1
    cost = (tmp_path / "cost.md").read_text()
    assert "| automatic |" in cost


def test_the_best_rate_is_chosen_by_validation() -> None:
    def cell(right: float, loss: float) -> list[dict[str, float]]:
        return [{"validation": right, "validation loss": loss, "test": 1 - right}]

    sweep = {
        ("a", 0.1): cell(0.8, 1.0),
        ("a", 0.2): cell(0.9, 1.0),
        ("a", 0.3): cell(0.9, 0.5),
        ("b", 0.1): cell(0.7, 1.0),
    }
    assert shaped_tables.best_rates(sweep) == {"a": 0.3, "b": 0.1}


QUICK = ("mlp", "abrupt change")


@pytest.mark.parametrize(
    "problem", [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in PROBLEMS]
)
def test_both_arms_of_a_problem(problem: str) -> None:
    state = torch.get_rng_state()
    found = compare(Comparison(problem, queries=4, steps=6))
    assert torch.equal(torch.get_rng_state(), state)
    for arm in ("shaped", "isotropic"):
        assert len(found[arm]) == 6
        assert all(abs(c) < 1 + 1e-6 for row in found[arm] for c in row)
    assert found["losses"] == compare(Comparison(problem, queries=4, steps=6))["losses"]


def test_tables_and_plots_are_written_and_finished_runs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Shaped(seeds=1, workers=0, most=1, output=tmp_path).study()
    study = replace(asked, lengths=((2, 1, 0),), rates=(1e-3,))
    shaped.main(("main", "accuracy"), study)
    assert "Cosine to the exact gradient" in capsys.readouterr().out
    assert (tmp_path / "main.png").read_bytes().startswith(b"\x89PNG")
    assert "| 2 queries, from step 0 |" in (tmp_path / "main.md").read_text()
    titles = [table["title"] for table in json.loads((tmp_path / "accuracy.json").read_text())]
    assert titles == [
        "Learning rates, on the validation split",
        "Test accuracy after the same number of epochs",
    ]
    for cell in (tmp_path / "cells" / "sweep").iterdir():  # choosing never looks at the test split
        assert json.loads(cell.read_text())["result"]["test"] is None
    shaped.main(("allocators",), study)
    rows = (tmp_path / "allocators.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[4:7]] == list(shaped.ALLOCATORS)
    before = (tmp_path / "main.md").read_text()
    cells = {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/*.json")}
    assert len(cells) == 2 + 2 + 2 + 2  # allocators share one with main
    shaped.main(("main", "accuracy"), study)
    assert (tmp_path / "main.md").read_text() == before
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/*.json")} == cells


def test_the_command_asks_for_what_its_options_say(tmp_path: Path) -> None:
    found = Shaped(seeds=2, grid_seeds=3, workers=0, most=1, output=tmp_path).study()
    assert (found.folder, found.seeds, found.grid_seeds, found.workers, found.most) == (
        *(tmp_path, 2, 3, 0, 1),
    )
    assert len(found.lengths) == 2
    assert len(found.rates) == 3
    with pytest.raises(SystemExit, match="--seeds must be at least 1, not 0"):
        main(["study", "shaped", "--output", str(tmp_path), "--seeds", "0"])


@pytest.mark.slow
def test_a_language_model_on_texts(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model": "bundled", "data": "garments", "queries": 6, "every": 2}
    rows: dict[str, tuple[int, MethodName]] = {
        "all": (2, "shaped-lr"),
        "exact": (2, "bp"),
        "last": (1, "shaped-lr"),
    }
    study = Shaped(seeds=1, workers=0, most=4, output=tmp_path).study()
    shaped.main(("text",), replace(study, layers=rows, text=small))
    table = {row[0]: row for row in json.loads((tmp_path / "text.json").read_text())[0]["rows"]}
    assert 0.1 < float(table["all"][1]) < 1
    assert table["exact"][1] == "-"
    assert table["last"][3:5] == ["", ""]
    exact = train_text(TextRun(2, "shaped-lr", steps=1, **{**small, "queries": 600}))
    assert exact["cosines"][0] > 0.9
    assert set(exact["groups"][0]) == {"blocks-1", "blocks-2", "model.norm"}


def test_the_excess_of_a_training_loss_is_that_of_its_running_average() -> None:
    steady, rising = [1.0] * 4, [1.0, 1.0, 2.0, 1.0]
    assert running(rising) == pytest.approx([1.0, 1.0, 1.1, 1.09])
    results = {
        name: [{"losses": losses, "steps": [0, 1], "cosines": [0.5, 0.7], "validation": 0.5}]
        for name, losses in (("rising", rising), ("steady", steady))
    }
    first, last = text_sheet(results, 1).rows
    assert list(first[1:5]) == ["0.700", "1.090", "+0.090", "+0.100"]
    assert list(last[3:5]) == ["", ""]
