"""What `flops tune` says about its runs."""

from __future__ import annotations

from typing import Any

import pytest

from flops.tasks.tuning.names import FUNCTION_METHODS, PROMPT_METHODS
from flops.tasks.tuning.report import below_start, differences, run_name, table


class Problem:
    title, note = "Tuning", "A note."

    def __init__(self, metric: Any) -> None:
        self.metric = metric


def result(method: str, seed: int = 0, **values: Any) -> dict[str, Any]:
    given = {"method": method, "seed": seed, "step_size": 0.1, "chosen": True, "accuracy": 50.0}
    counts = dict.fromkeys(("queries", "texts", "requests", "retries", "failed", "seconds"), 1000)
    losses = {"loss": 1.0, "validation_loss": 1.0, "start_loss": 2.0, "last_loss": 1.0, "steps": 3}
    return given | counts | losses | values


def test_methods_below_the_start_are_named() -> None:
    runs = [
        result("start", loss=1.5),
        result("lr"),
        result("spsa", last_loss=3.0, validation_loss=1.9),
        result("cma-es", loss=1.75),
    ]
    said = below_start(Problem("loss"), runs)
    assert said == [
        "spsa ends below its start: validation loss 3, 2 at the start; the best parameters on the "
        "way (1.9) are kept",
        "cma-es is worse than start on the test points: loss 1.75 against 1.5",
    ]
    (said,) = below_start(Problem("loss"), [result("lr", last_loss=2.0, steps=0)])
    assert said.startswith("lr made no step: the budget does not reach the first; raise --budget")
    runs = [result("manual", accuracy=60.0), result("lr"), result("bp", accuracy=70.0)]
    (said,) = below_start(Problem("accuracy"), runs)
    assert said == "lr is worse than manual on the test points: accuracy 50 against 60"


@pytest.mark.parametrize(("metric", "shown"), [("accuracy", "50.0"), ("loss", "1")])
def test_the_table_has_the_metric_and_the_price(metric, shown) -> None:
    runs = [result("lr"), result("cma-es", step_size=None)]
    text = table(Problem(metric), runs, ["lr", "cma-es"], 2.0).markdown()
    (lr,) = (line for line in text.splitlines() if line.startswith("| lr"))
    cells = [cell.strip() for cell in lr.split("|")]
    assert cells[2] == shown
    assert cells[-2] == "2.00"
    assert "searched" in text


def test_differences_are_paired_by_seed() -> None:
    runs = [result("start", loss=3.0)]
    runs += [result("lr", seed, loss=1.0 + 0.1 * seed) for seed in range(3)]
    sheet = differences(Problem("loss"), runs)
    assert sheet is not None
    assert "lr - start" in sheet.markdown()
    assert "-1.9" in sheet.markdown()
    assert differences(Problem("loss"), runs[:2]) is None


def test_names_of_runs() -> None:
    assert run_name("start", 0.0, 0) == "start"
    assert run_name("lr", None, 2) == "lr-auto-seed2"
    assert run_name("lr", 0.1, 2) == "lr-0.1-seed2"
    assert set(PROMPT_METHODS) ^ set(FUNCTION_METHODS) == {"manual", "bp", "start"}
