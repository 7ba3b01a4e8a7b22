"""`flops report`: runs, comparisons and studies, and folders that are none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flops.cli.main import main
from flops.experiments.compare_curves import Panel, levels, mean_curves, numbered, plot
from flops.experiments.compare_report import ComparisonResults
from flops.experiments.compare_sweep import Chosen, Tried
from flops.experiments.report_pages import page_of
from flops.report.run_record import ReportError
from flops.report.table import Sheet
from tests.support.html_page import Page
from tests.support.recorded_runs import write_run


def one(step: int, accuracy: float) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "accuracy": accuracy,
        "loss": 1.0,
        "queries": 100 * step,
        "forward_equivalents": 300.0 * step,
        "seconds": 2.0 * step,
        "marks": [],
        "test": accuracy - 0.01,
    }


def seed(*accuracies: float) -> dict[str, Any]:
    curve = [one(10 * i, a) for i, a in enumerate(accuracies)]
    return {
        "at_budget": curve[-1],
        "at_epochs": curve[min(1, len(curve) - 1)],
        "curve": curve,
        "peak_memory": 2**29,
    }


RESULTS = {
    "bp": [seed(0.1, 0.9, 0.97), seed(0.1, 0.8, 0.95)],
    "shaped-lr": [seed(0.1, 0.7, 0.94), seed(0.1, 0.5, 0.92)],
}
FOUND = ComparisonResults(
    "epochs",
    8,
    60_000.0,
    {m: Chosen(1e-3, 1e-3, 1e-3, 1e-3, (Tried(1e-3, 1e-3, 0.9, None),)) for m in RESULTS},
    RESULTS,
    {"model": "bundled", "data": "digits"},
    chance=0.1,
    environment={"python": "3.11"},
)


def write(folder: Path, kept: dict[str, Any]) -> Path:
    (folder / "cells/runs").mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(kept))
    return folder


def test_curves_are_means_over_seeds() -> None:
    found = mean_curves({**RESULTS, "zero-shot": [seed(0.2)]})
    assert list(found) == ["bp", "shaped-lr"]
    assert found["shaped-lr"].cost == (3000, 6000)  # without the start: the axis is logarithmic
    assert found["shaped-lr"].mean == pytest.approx((60, 93))
    assert found["shaped-lr"].low == pytest.approx((50, 92))
    assert found["shaped-lr"].high == pytest.approx((70, 94))
    lines = levels({**RESULTS, "zero-shot": [seed(0.2)]}, 0.1)
    assert list(lines) == ["chance", "before training", "backpropagation at the end"]
    assert list(lines.values()) == pytest.approx([10, 20, 96])
    assert list(numbered(lines))[1:] == ["before training, 20%", "backpropagation at the end, 96%"]


def test_the_picture_of_a_comparison(tmp_path: Path) -> None:
    path, results = tmp_path / "accuracy.png", {**RESULTS, "zero-shot": [seed(0.2)]}
    plot(path, Panel(FOUND.title, results, 0.1))
    with Image.open(path) as image:
        assert image.width >= 900
        alone = image.width
    plot(path, Panel("one", results, 0.1), Panel("other", RESULTS))
    with Image.open(path) as image:
        assert image.width > 1.3 * alone


def test_a_comparison_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "out", FOUND.to_dict())
    assert ComparisonResults.read(folder) == FOUND
    main(["report", str(folder)])
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    for said in (
        "Bundled model on digits: methods compared",
        "(a) Equal cost: 60,000 forward equivalents, mean ± standard deviation over 2 seeds",
        "(b) Equal epochs: 8",
        "Sweep",
        "shaped likelihood ratio (ours)",
        "chance, 10%",
        "92.0 ± 1.4",
    ):
        assert said in page.text, said


def test_results_of_older_versions_have_one_too(tmp_path: Path) -> None:
    kept = {
        n: v for n, v in FOUND.to_dict().items() if n in ("epochs", "budget", "chosen", "results")
    }
    text = Page(page_of([write(tmp_path / "out", kept)])).text
    assert "Comparison: methods compared" in text
    assert "chance" not in text


def test_a_study_is_its_tables_and_figures(tmp_path: Path) -> None:
    sheet = Sheet("Cosines <all>", ["budget", "lr"], [["5", "0.1 ± 0.02"]], "Over 5 seeds.")
    (tmp_path / "main.md").write_text(sheet.markdown() + "\nA sentence.\n", encoding="utf-8")
    Image.new("L", (4, 4)).save(tmp_path / "main.png")
    page = Page(page_of([tmp_path]))
    assert "Cosines <all>\nbudget\nlr\n5\n0.1 ± 0.02\nOver 5 seeds.\nA sentence." in page.text
    assert len(page.images) == 1


def test_what_cannot_be_reported_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun/cells").mkdir(parents=True)
    damaged = write(tmp_path / "damaged", {})
    (damaged / "results.json").write_text('{"chosen": ')
    for folders, said in (
        ([], "at least one run"),
        ([tmp_path / "nowhere"], "is not a folder"),
        ([run, run], "is given twice"),
        ([tmp_path / "empty"], "holds no run"),
        ([run, tmp_path / "empty"], "give several runs, or one folder"),
        ([tmp_path / "begun"], "the same command continues it"),
        ([damaged], "is damaged, or not of a comparison"),
    ):
        with pytest.raises(ReportError, match=said):
            page_of(folders)
    with pytest.raises(SystemExit, match=r"flops: .*nowhere is not a folder"):
        main(["report", str(tmp_path / "nowhere")])


def test_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    main(["report", *names])
    assert capsys.readouterr().out == "report.html\n"
    assert "pets: 2 runs" in Page(Path("report.html").read_text(encoding="utf-8")).text
    main(["report", names[0], "--output", "pages/a.html"])
    assert Path("pages/a.html").is_file()
