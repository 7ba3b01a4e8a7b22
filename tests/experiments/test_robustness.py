"""The study of robustness, end to end: tables, run directorys, and what is not computed again."""

from __future__ import annotations

import csv
import json
import math
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flops.cli.main import main
from flops.cli.robustness import Robustness
from flops.experiments import cells, robustness
from flops.experiments.robustness_runs import open_run, read_run
from flops.experiments.robustness_training import ModelTraining
from flops.experiments.robustness_trials import KINDS, Strengths, Trial, changed, measure, of_pixels
from flops.tasks.classification.config import FinetuneConfig
from flops.training.loop import train
from flops.training.run_directory import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")

COMMON = ("--limit", "48", "--steps", "2", "--bounds", "8", "16", "--workers", "0")
TRAINED = (
    "--methods", "bp", "ops-lr", "--seeds", "2", "--epochs", "1", "--queries", "2",
    "--batch", "16",
)  # fmt: skip


def study(output: Path, *options: str) -> None:
    main(["study", "robustness", "--output", str(output), *COMMON, *options])


def runs_of(folder: Path) -> list[str]:
    return [str(path) for path in sorted((folder / "models").iterdir())]


def trials(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["trials"]
    return found


Computed = Callable[[], list[tuple[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("robustness")
    study(folder, *TRAINED)
    return folder


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "copy"))


@pytest.fixture
def computed(copy: Path) -> Computed:
    """Part and settings of the cells that were run: each has written a new file."""

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in (copy / "cells").rglob("*.json")}

    before = files()

    def found() -> list[tuple[str, dict[str, Any]]]:
        new = [path for path, time in files().items() if time != before.get(path)]
        return [(path.parent.name, json.loads(path.read_text())["settings"]) for path in new]

    return found


def test_tables_files_and_figure(done: Path) -> None:
    found = trials(done)
    assert len(found) == 2 * 2 * (len(KINDS) + 3)
    assert all(one["points"] == 48 for one in found)
    text = (done / "tables.md").read_text()
    header = "| data | method | Original | Gaussian | Uniform | Poisson | FGSM | I-FGSM | MI-FGSM |"
    assert header in text
    for stated in ("deviation 0.1", "±0.1", "pixel/100", "8/255", "2 steps", "normalisation"):
        assert stated in text
    for stated in ("bp learning rate 0.001, 1 epoch;", "ops-lr learning rate 0.001, sigma 0.01"):
        assert stated in text
    assert (done / "bounds.png").stat().st_size > 20_000
    with (done / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found)
    for line, one in zip(lines, found, strict=True):
        assert (line["method"], line["noise"]) == (one["method"], one["kind"])
        assert float(line["accuracy_percent"]) == pytest.approx(100 * one["correct"] / 48, abs=1e-3)


def test_the_tables_hold_what_the_trials_found(done: Path) -> None:
    by = {(t["method"], t["seed"], t["kind"], t["strength"]): t["accuracy"] for t in trials(done)}
    text = (done / "tables.md").read_text()
    bp = [100 * by["bp", seed, "fgsm", 8.0] for seed in (0, 1)]
    row = next(line for line in text.splitlines() if line.startswith("| digits | bp |"))
    mean, spread = sum(bp) / 2, abs(bp[0] - bp[1]) / math.sqrt(2)
    assert row.split("|")[7].strip() == f"{mean:.1f} ± {spread:.1f}"
    gaps = [100 * by["ops-lr", s, "poisson", 100.0] - 100 * by["bp", s, "poisson", 100.0]
            for s in (0, 1)]  # fmt: skip
    half = 12.7062 * abs(gaps[0] - gaps[1]) / 2  # t of one degree of freedom
    section = text.split("### Difference to bp, points of accuracy\n")[1]
    row = next(line for line in section.splitlines() if line.startswith("| ops-lr |"))
    assert row.split("|")[2].strip() == "2"
    assert row.split("|")[6].strip() == f"{sum(gaps) / 2:+.1f} ± {half:.1f}"


def test_attacks_and_noise_do_what_they_should(done: Path) -> None:
    for method in ("bp", "ops-lr"):
        for seed in (0, 1):
            mine = [t for t in trials(done) if (t["method"], t["seed"]) == (method, seed)]
            loss = {(t["kind"], t["strength"]): t["loss"] for t in mine}
            for kind in ("fgsm", "i-fgsm", "mi-fgsm"):
                assert loss["clean", 0.0] < loss[kind, 8.0] < loss[kind, 16.0]
            for kind, strength in (("gaussian", 0.1), ("uniform", 0.1), ("poisson", 100.0)):
                assert loss[kind, strength] == pytest.approx(loss["clean", 0.0], rel=0.2)
                assert loss[kind, strength] != loss["clean", 0.0]
            assert all(t["unmoved"] == (48 if t["kind"] == "clean" else 0) for t in mine)


def test_a_finished_study_computes_nothing(copy: Path, computed: Computed) -> None:
    before = (copy / "tables.md").read_bytes(), (copy / "results.json").read_bytes()
    (copy / "tables.md").unlink()
    study(copy, *TRAINED)
    assert computed() == []
    assert before == ((copy / "tables.md").read_bytes(), (copy / "results.json").read_bytes())
    study(copy, *TRAINED, "--gaussian", "0.3", "--steps", "2")  # what does not concern it is kept
    assert [settings["kind"] for _, settings in computed()] == 4 * ["gaussian"]


def test_a_removed_model_is_trained_again_and_is_the_same(copy: Path, computed: Computed) -> None:
    gone = Path(runs_of(copy)[0])
    digest = read_run(gone).digest
    shutil.rmtree(gone)
    study(copy, *TRAINED)
    assert [part for part, _ in computed()] == ["training"]
    assert read_run(gone).digest == digest


def test_a_training_that_was_killed_goes_on(copy: Path, computed: Computed) -> None:
    gone = Path(runs_of(copy)[0])
    run = read_run(gone)
    shutil.rmtree(gone)
    RunDirectory.create(gone, run.config).close()  # it had just begun
    study(copy, *TRAINED)
    assert [part for part, _ in computed()] == ["training"]
    assert read_run(gone).digest == run.digest


@pytest.mark.slow
def test_run_folders_give_the_same_tables(done: Path, tmp_path: Path) -> None:
    study(tmp_path, "--runs", *runs_of(done))
    assert (tmp_path / "tables.md").read_bytes() == (done / "tables.md").read_bytes()
    assert trials(tmp_path) == trials(done)


def test_a_run_of_finetune_is_the_model_trained_here(done: Path, tmp_path: Path) -> None:
    settings = ModelTraining("bp", 1e-3, None, 1, "bundled", "digits", 2.0, 16, 48, seed=1)
    main(
        ["finetune", "--method", "bp", "--limit", "48", "--epochs", "1", "--batch", "16",
         "--queries", "2", "--seed", "1", "--sigma", "None", "--output", str(tmp_path / "run")]
    )  # fmt: skip
    assert read_run(tmp_path / "run").digest == read_run(settings.place(done)).digest


def test_a_run_with_automatic_queries_can_be_studied(tmp_path: Path) -> None:
    main(
        ["finetune", "--queries", "auto", "--limit", "24", "--steps", "1", "--batch", "12",
         "--no-plots", "--output", str(tmp_path / "run")]
    )  # fmt: skip
    study(tmp_path / "study", "--runs", str(tmp_path / "run"), "--limit", "12")
    assert "auto queries" in (tmp_path / "study" / "tables.md").read_text(encoding="utf-8")


def test_clean_accuracy_is_that_of_training(tmp_path: Path) -> None:
    output = str(tmp_path / "run")
    config = FinetuneConfig(method="bp", limit=48, epochs=2, batch=16, test=True, output=output)
    expected = train(config).evaluations[-1].test
    run = read_run(tmp_path / "run")
    found = measure(Trial("bp", run.digest, "clean", limit=48), run)
    assert found["accuracy"] == expected
    assert found["points"] == 48
    every = measure(Trial("bp", run.digest, "clean"), run)
    assert every["points"] == 300  # the whole test set, whatever the run was trained on


def test_every_model_sees_the_same_noise(done: Path) -> None:
    rows = torch.arange(20)
    seen = []
    state = torch.get_rng_state()
    for path in runs_of(done)[:2]:
        model, format, data = open_run(read_run(Path(path)), 48)
        images, labels = data.test.batch(rows)
        pixels = format.restore(images)
        seen.append(
            [
                changed(Trial("", "", kind, strength), of_pixels(model, format), pixels, labels,
                        rows)
                for kind, strength in (("gaussian", 0.1), ("uniform", 0.1), ("poisson", 100.0))
            ]
        )  # fmt: skip
        assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_trial_changes_neither_the_random_state_nor_the_run(done: Path) -> None:
    run = read_run(Path(runs_of(done)[0]))
    state = torch.get_rng_state()
    for kind in ("poisson", "mi-fgsm"):
        measure(Trial("bp", run.digest, kind, 8.0, 2, limit=16), run)
    assert torch.equal(torch.get_rng_state(), state)
    assert read_run(run.path) == run


def test_what_workers_are_sent_can_be_sent(done: Path) -> None:
    asked = Robustness(limit=48, steps=2, bounds=(8.0, 16.0), output=done).study()
    sent = robustness.trial_cells([read_run(Path(path)) for path in runs_of(done)], asked)
    assert len(sent) == 40
    assert all(cell.load(done) is not None for cell in sent)  # these are the cells of the command
    restored = pickle.loads(pickle.dumps(sent[0]))
    assert restored.settings == sent[0].settings
    assert restored.measure.keywords == sent[0].measure.keywords  # type: ignore[attr-defined]


def test_without_matplotlib_there_are_tables(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tables.md", "bounds.png"):
        (copy / name).unlink()
    shutil.rmtree(runs_of(copy)[0])  # training draws plots as well
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    study(copy, *TRAINED)
    assert "no plot was drawn" in capsys.readouterr().out
    assert (copy / "tables.md").is_file()
    assert not (copy / "bounds.png").exists()


def test_trials_leave_out_what_does_not_concern_them(done: Path) -> None:
    run = read_run(Path(runs_of(done)[0]))
    one = Strengths(bounds=(16.0,), steps=5, noise_seed=1).trials(run, None)
    other = Strengths(bounds=(16.0,), steps=3, noise_seed=2).trials(run, None)
    same = {a.kind for a, b in zip(one, other, strict=True) if a == b}
    assert same == {"clean", "fgsm"}
    assert len({cells.Cell("", measure, trial).name for trial in one}) == len(one) == 10
