"""The study of robustness: what it refuses, its options, and tables of odd results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flops.cli.main import main
from flops.cli.robustness import QUICK, Robustness
from flops.errors import FlopsError
from flops.experiments.robustness_runs import check_alike, open_run, read_run
from flops.experiments.robustness_tables import (
    Found,
    accuracy_sheet,
    bounds_sheet,
    differences_sheets,
    relative_sheet,
    write_csv,
)
from flops.experiments.robustness_trials import KINDS, Kind, Strengths, Trial
from flops.tasks.classification.config import FinetuneConfig
from flops.training.loop import train

STRENGTHS = Strengths()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(FinetuneConfig(method="bp", limit=32, epochs=1, batch=32, output=str(folder)))
    return folder


@pytest.fixture
def altered(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run with other settings, as another run would have."""

    def make(name: str, **settings: Any) -> Path:
        path = Path(shutil.copytree(made, tmp_path / name))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **settings}))
        return path

    return make


def refused(*options: str, output: Path) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["study", "robustness", "--output", str(output), "--workers", "0", *options])
    assert not list(output.glob("*.md"))
    return str(stopped.value)


def test_folders_that_are_no_finished_run(made: Path, tmp_path: Path) -> None:
    out, empty, other, above = (tmp_path / n for n in ("out", "empty", "other", "above"))
    said = refused("--runs", str(tmp_path / "none"), output=out)
    assert "no folder" in said
    assert "flops finetune" in said
    empty.mkdir()
    assert "holds no run (it is empty)" in refused("--runs", str(empty), output=out)
    other.mkdir()
    (other / "notes.txt").write_text("no run")
    assert "(there is no config.json); pass folders" in refused("--runs", str(other), output=out)
    shutil.copytree(made, above / "inside")
    assert "it holds runs, such as inside" in refused("--runs", str(above), output=out)


def test_an_unfinished_run(altered: Callable[..., Path], tmp_path: Path) -> None:
    whole, cut = altered("whole"), altered("cut", seed=1)
    (cut / "model" / "preprocessor_config.json").unlink()  # killed while it wrote the model
    said = refused("--runs", str(whole), str(cut), output=tmp_path / "out")
    assert "has not finished" in said
    assert f"flops finetune --resume {cut}" in said
    shutil.rmtree(cut / "model")
    assert "has not finished" in refused("--runs", str(cut), output=tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1, "model": "random:vit-base"}, "has model 'random:vit-base'"),
        ({"seed": 1, "data": "fashion-mnist"}, "has data 'fashion-mnist'"),
        ({"seed": 1, "learning_rate": 0.5}, "may differ in their seeds only"),
        ({"device": "cpu"}, "both of bp with seed 0; leave out one"),
    ],
)
def test_runs_that_do_not_go_together(
    changed: dict[str, Any], said: str, made: Path, altered: Callable[..., Path], tmp_path: Path
) -> None:
    other = altered("other", **changed)
    assert said in refused("--runs", str(made), str(other), output=tmp_path / "out")


@pytest.mark.parametrize("changed", [{"head": "kept"}, {"limit": 64}])
def test_another_start_or_fewer_points(
    changed: dict[str, Any], made: Path, altered: Callable[..., Path]
) -> None:
    other = altered("other", method="lr", **changed)
    with pytest.raises(FlopsError, match=f"has {next(iter(changed))} "):
        check_alike([read_run(made), read_run(other)])


def test_other_classes(made: Path, altered: Callable[..., Path]) -> None:
    other = altered("other", seed=1)
    config = json.loads((other / "model" / "config.json").read_text())
    config["id2label"].popitem()
    (other / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlopsError, match=r"has 9 classes .* has 10"):
        check_alike([read_run(made), read_run(other)])
    config["id2label"] = {str(number): f"sign {number}" for number in range(10)}
    (other / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlopsError, match=r"was trained on the classes sign 0, .* restore the data"):
        open_run(read_run(other), None)
    (other / "model" / "config.json").write_text("{}")
    with pytest.raises(FlopsError, match="does not name the classes"):
        read_run(other)


def test_damaged_weights(altered: Callable[..., Path]) -> None:
    path = altered("damaged")
    (path / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FlopsError, match="cannot be measured"):
        open_run(read_run(path), None)


def test_what_the_options_refuse(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options, said in (
        (("--runs", str(made), "--methods", "bp"), "already trained: leave out --methods"),
        (("--runs", str(made), "--data", "fashion-mnist"), "with --data digits, not fashion-mnist"),
        (("--methods", "mezo"), "no default for mezo: pass --learning-rates mezo=VALUE"),
        (("--learning-rates", "ops-lr"), "METHOD=VALUE with a value greater than 0"),
        (("--learning-rates", "adam=1"), "not 'adam=1'; methods are bp, "),
        (("--sigmas", "ops-lr=-1"), "not 'ops-lr=-1'"),
        (("--seeds", "0"), "seeds and epochs must be at least 1"),
        (("--gaussian", "0"), "--gaussian must be greater than 0, not 0"),
        (("--bounds", "8", "256"), "at most 255, not 256"),
        (("--bound", "0"), "greater than 0 and at most 255, not 0"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--limit", "0"), "--limit must be at least 1"),
    ):
        assert said in refused(*options, output=out), options
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refused(output=tmp_path / "file" / "out")
    with pytest.raises(FlopsError, match="there is no run to measure"):
        check_alike([])


def test_a_quick_look_leaves_what_was_asked_for() -> None:
    given = Robustness(quick=True, epochs=3, sigmas=("ops-lr=5e-4",), methods=("bp", "ops-lr"))
    quick = given.quick_look()
    trainings, study = quick.trainings(), quick.study()
    assert [(t.method, t.seed, t.epochs) for t in trainings] == [("bp", 0, 3), ("ops-lr", 0, 3)]
    assert [t.sigma for t in trainings] == [None, 5e-4]
    assert study.limit == QUICK["limit"]
    assert study.strengths.all_bounds == [8, 32]
    assert study.folder == QUICK["output"]
    every = Robustness().trainings()
    chosen = {t.method: (t.learning_rate, t.sigma) for t in every}
    assert chosen == {
        "bp": (1e-3, None),
        "ops-lr": (1e-3, 1e-2),
        "ops-spsa": (3e-3, 1e-3),
        "shaped-lr": (1e-3, 1e-3),
    }
    assert len(every) == 20
    assert {t.epochs for t in every} == {6}


def rows(method: str, seed: int, **accuracy: float) -> list[tuple[Trial, dict[str, Any]]]:
    """Results of a model: clean as given, half of it under noise unless given."""
    found = []
    for kind in KINDS:
        value = accuracy.get(kind.replace("-", "_"), accuracy["clean"] / 2)
        trial = Trial(method, "", kind, STRENGTHS.of(kind), seed=seed)
        result = {"points": 50, "correct": round(50 * value), "accuracy": value, "loss": 1.0}
        found.append((trial, {**result, "unmoved": 1}))
    return found


def test_kept_and_differences_of_known_results() -> None:
    found = Found(
        "digits",
        [
            *rows("bp", 0, clean=0.8, fgsm=0.2),
            *rows("bp", 1, clean=0.9, fgsm=0.3),
            *rows("ops-lr", 1, clean=0.6, fgsm=0.3),
            *rows("ops-lr", 0, clean=0.5, fgsm=0.2),
            *rows("ops-lr", 7, clean=0.5, fgsm=0.2),  # bp has no such seed
        ],
    )
    kept = {row[0]: row[1:] for row in relative_sheet(found, STRENGTHS).rows}
    assert kept["bp"][0] == "50.0 ± 0.0"
    assert kept["bp"][3] == "29.2 ± 5.9"  # 25 and 33.3
    absolute, relative = differences_sheets(found, STRENGTHS)
    assert absolute.rows[0][:3] == ("ops-lr", "2", "-30.0 ± 0.0")
    assert absolute.rows[0][6] == "+0.0 ± 0.0"
    assert relative.header[2] == "Gaussian"
    assert relative.rows[0][5] == "+15.8 ± 10.6"  # 15 and 16.7, t = 12.7
    assert found.unmoved("bp") == pytest.approx(1 / 50)
    assert bounds_sheet(found, STRENGTHS) is None


def test_nothing_right_nothing_kept(tmp_path: Path) -> None:
    found = Found("digits", [*rows("bp", 0, clean=0.0), *rows("lr", 3, clean=0.5)])
    assert relative_sheet(found, STRENGTHS).rows[0][1:] == ("-",) * 6
    assert accuracy_sheet(found, STRENGTHS, "").rows[0][2:] == ("0.0",) * 7
    for sheet in differences_sheets(found, STRENGTHS):  # no seed in common
        assert set(sheet.rows[0][2:]) == {"-"}
    write_csv(tmp_path / "results.csv", found)
    assert ",0.0000,,1,1" in (tmp_path / "results.csv").read_text()
    assert differences_sheets(Found("digits", rows("bp", 0, clean=0.5)), STRENGTHS) == []
    assert differences_sheets(Found("digits", rows("lr", 0, clean=0.5)), STRENGTHS) == []


def test_a_kind_has_one_strength_in_the_table() -> None:
    strengths = Strengths(0.2, 0.3, 40.0, 4.0, (16.0, 8.0))
    expected: dict[Kind, float] = {"clean": 0, "gaussian": 0.2, "uniform": 0.3, "poisson": 40}
    assert {k: strengths.of(k) for k in KINDS} == {
        **expected, "fgsm": 4, "i-fgsm": 4, "mi-fgsm": 4
    }  # fmt: skip
    assert strengths.all_bounds == [4, 8, 16]
