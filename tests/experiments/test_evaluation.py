"""`flops evaluate`: the accuracy that training found, other splits, other data, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flops.cli.main import main
from flops.errors import FlopsError
from flops.experiments.evaluation import evaluate_run, wilson
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.text import TextConfig
from flops.training.loop import train
from tests.support.pictures import make_folder


def test_it_finds_the_accuracy_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FinetuneConfig(limit=40, batch=8, epochs=1, method="bp", plots=False, test=True)
    ran = train(config.replace(output=str(tmp_path / "run")))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    main(["evaluate", str(tmp_path / "run"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == ran.test
    assert found["points"] == 40
    assert found["splits"] == ["test"]
    assert found["step"] == ran.steps
    both = evaluate_run(tmp_path / "run", splits=("validation", "test"))
    assert both.accuracy == pytest.approx((ran.accuracy + (ran.test or 0)) / 2)
    assert str(both).startswith("digits, validation and test splits (80 points), after step 5: ")
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_other_data_must_have_the_same_classes(tmp_path: Path) -> None:
    for name, classes in (
        ("data", {"cat": 12, "dog": 12}),
        ("more", {"cat": 5, "dog": 4}),
        ("fish", {"cat": 5, "eel": 5}),
    ):
        make_folder(tmp_path / name, classes)
    config = FinetuneConfig(data=str(tmp_path / "data"), batch=8, epochs=1, method="bp")
    train(config.replace(plots=False, output=str(tmp_path / "run")))
    found = evaluate_run(tmp_path / "run", str(tmp_path / "more"))
    assert found.points == 9  # all of them, not a split
    assert found.splits == ("train", "validation", "test")
    with pytest.raises(FlopsError, match=r"the run has 2 classes \(cat, dog\), and '.*fish' has 2"):
        evaluate_run(tmp_path / "run", str(tmp_path / "fish"))
    with pytest.raises(FlopsError, match="holds no run"):
        evaluate_run(tmp_path / "data")


def test_texts_keep_the_prompt_of_the_run(tmp_path: Path) -> None:
    config = TextConfig(limit=16, batch=8, epochs=1, method="bp", plots=False)
    train(config.replace(output=str(tmp_path / "run")))
    own = evaluate_run(tmp_path / "run", splits=("test",))
    same = evaluate_run(tmp_path / "run", "garments", splits=("test",), limit=16)
    assert (same.accuracy, same.loss, same.points) == (own.accuracy, own.loss, own.points)


def test_intervals_of_shares() -> None:
    # Wilson (1927), by the printed formula for 8 of 10 and for extremes.
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(1.0, 50)[1] == pytest.approx(1)
    assert wilson(0.0, 50)[0] == pytest.approx(0)
