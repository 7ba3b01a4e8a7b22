"""`flops study gradients`: files, tables, resuming, errors."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flops.cli.main import main
from flops.cli.study import Gradients
from flops.experiments import gradients
from flops.experiments.gradients_ablations import ABLATIONS, ablation_sheet
from flops.experiments.gradients_panel import Panel
from flops.experiments.gradients_tables import (
    contrasts_sheet,
    differences_sheet,
    enough_sheet,
    means_sheet,
    over_panels,
    stage_names,
    variance_sheet,
)
from flops.experiments.gradients_thirds import Thirds
from flops.report.intervals import t_quantile

TINY = ["study", "gradients", "--stages", "1", "2", "--budgets", "2", "4", "--repeats", "2"]
TINY += ["--batch", "4", "--warm", "1", "--learn", "1", "--layers", "last", "--workers", "0"]


def hand() -> list[tuple[Panel, dict[str, Any]]]:
    """Two panels, two budgets, two repeats, of numbers that are easy to add up."""
    common: dict[str, Any] = {"budgets": (5, 20), "allocators": ("equal", "gaussian")}

    def result(equal: Any, gaussian: Any, noise: float) -> dict[str, Any]:
        each = [[noise, noise], [noise, noise]]
        cosine = {"equal": equal, "gaussian": gaussian}
        return {"cosine": cosine, "noise": {"equal": each, "gaussian": each}, "norm": [2.0, 2.0]}

    first = result([[0.1, 0.2], [0.2, 0.3]], [[0.2, 0.2], [0.4, 0.6]], 1.0)
    second = result([[0.3, 0.4], [0.4, 0.5]], [[0.4, 0.4], [0.8, 0.8]], 3.0)
    panel = Panel(repeats=2, **common)
    return [(panel, first), (Panel(repeats=2, matrix="ff", **common), second)]


def test_tables_by_hand() -> None:
    found = hand()
    assert over_panels(found, "equal", 0) == pytest.approx([0.2, 0.3])
    # t with one degree of freedom, times half the difference of two values
    half = t_quantile(1) * 0.1 / 2
    assert half == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert means_sheet(found).rows[0][3] == f"0.250 ± {half:.3f}"
    row = differences_sheet(found).rows[0]
    assert row[:3] == ["after 20 steps", "LR", "Gaussian - equal"]
    assert row[3] == f"+0.050 ± {half:.3f}"  # (0.1, 0.0)
    assert row[4] == f"+0.300 ± {t_quantile(1) * 0.0:.3f}"  # (0.3, 0.3)
    assert row[5] == f"+0.250 ± {half:.3f}"  # (0.2, 0.3)
    rows = variance_sheet(found).rows
    assert [r[4] for r in rows] == ["25.0 ± 0.0", "75.0 ± 0.0"]
    assert [r[5] for r in rows] == ["0.5 ± 0.0", "1.5 ± 0.0"]
    contrasts = contrasts_sheet(found)
    assert contrasts is not None
    assert contrasts.rows[0][1:4] == ["feed-forward - Key, LR", "equal", "+0.200 ± 0.000"]
    assert contrasts_sheet(found[:1]) is None
    assert enough_sheet(found).rows[0][3:] == ["71", "100"]
    assert stage_names((20, 150, 60))[60] == "middle (60 steps)"


def test_ablations_are_compared_with_their_reference() -> None:
    def cosines(*values: float) -> dict[str, Any]:
        return {"cosine": {"first third": list(values), "last third": list(values)}}

    found = [
        (Thirds(repeats=2), cosines(0.5, 0.6)),
        (Thirds(repeats=2, baseline="none"), cosines(0.1, 0.2)),
        (Thirds(repeats=2, sigma=1.0, baseline="none"), cosines(0.1, 0.2)),
    ]
    rows = ablation_sheet(ABLATIONS["baselines"], found).rows
    assert [row[-1] for row in rows] == ["", "-0.400 ± 0.000", ""]  # the last has no reference
    assert rows[1][1] == "none, sigma 0.001"


@pytest.mark.slow
def test_the_command_writes_everything_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TINY, "--quick", "--output", str(tmp_path)]
    command += ["--parts", "matrices", "kernel", "baselines"]
    main(command)
    assert "Variance by matrix and layer" in capsys.readouterr().out
    for name in ("matrices-1-steps.png", "matrices-2-steps.png", "baselines.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "| early (1 steps) | SPSA | feed-forward of layer 6 |" in (
        tmp_path / "matrices.md"
    ).read_text("utf-8")
    with (tmp_path / "matrices.csv").open() as file:
        lines = list(csv.DictReader(file))
    cells = [json.loads(p.read_text()) for p in (tmp_path / "cells" / "matrices").iterdir()]
    assert len(cells) == 2 * 2 * 2  # stages, estimators, matrices
    assert len(lines) == len(cells) * 2 * 4 * 2  # budgets, allocators, repeats
    wanted = {
        (c["settings"]["steps"], c["settings"]["estimator"], c["settings"]["matrix"], q, a, r): v
        for c in cells
        for a, budgets in c["result"]["cosine"].items()
        for q, values in zip(c["settings"]["budgets"], budgets, strict=True)
        for r, v in enumerate(values)
    }
    assert {
        (
            int(line["steps"]),
            line["estimator"],
            line["matrix"],
            int(line["queries"]),
            line["allocator"],
            int(line["repeat"]),
        ): float(line["cosine"])
        for line in lines
    } == wanted
    assert not any(str(tmp_path) in json.dumps(cell) for cell in cells)  # it may be moved
    kept = {p: p.read_bytes() for p in tmp_path.glob("*.*") if p.suffix in (".md", ".csv")}
    written = {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/*.json")}
    assert written
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # tables come without it as well
    main(command)
    assert "no figure was drawn: this needs matplotlib" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in kept} == kept
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/*.json")} == written


@pytest.mark.slow
def test_targets_and_a_model_of_ones_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "image_size": 16, "patch_size": 8, "num_channels": 1}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    command = [*TINY, "--output", str(tmp_path / "out"), "--model", str(tmp_path / "model")]
    command += ["--layers", "middle", "last", "--stages", "1", "--perturb", "third"]
    main([*command, "--parts", "matrices", "targets", "--estimators", "lr"])
    with (tmp_path / "out" / "matrices.csv").open() as file:
        assert {line["layer"] for line in csv.DictReader(file)} == {"2", "4"}
    table = json.loads((tmp_path / "out" / "targets.json").read_text())[0]
    assert [row[1] for row in table["rows"]] == [
        f"{targets}, {noise}"
        for targets in ("leaf", "block", "stage")
        for noise in ("isotropic", "shaped")
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--layers", "9"], "no layer '9': the model has layers 1 to 6"),
        (["--matrices", "keys"], "no matrix 'keys' .* query, key, value, output, ff, ff2"),
        (["--allocators", "even"], "no allocator 'even': give one of equal, bernoulli"),
        (["--estimators", "mezo"], "no estimator 'mezo': give one of lr, spsa, es"),
        (["--budgets", "1"], "budgets: spsa needs at least 2"),
        (["--budgets", "5", "5"], "each only once"),
        (["--repeats", "0"], "repeats, warm and learn >= 1"),
        (["--batch", "5000"], "there are 1197 points"),
        (["--stages", "-1"], "stages >= 0"),
        (["--seed", "99999999999999999999"], "seed < 2"),
        (["--sigma", "inf"], "sigma and learning rate must be greater than 0 and finite"),
        (["--learning-rate", "-1"], "sigma and learning rate must be greater than 0 and finite"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--device", "abacus"], "device must be auto, cpu or cuda"),
    ],
)
def test_errors(tmp_path: Path, given: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main([*TINY, "--output", str(tmp_path), *given])
    assert not (tmp_path / "cells").exists()


def test_quick_is_smaller_where_nothing_is_given(tmp_path: Path) -> None:
    quick = Gradients(quick=True, output=tmp_path, repeats=7).study()
    full = Gradients(output=tmp_path).study()
    assert (quick.panel.repeats, quick.panel.batch, quick.layers) == (7, 8, ("first", "last"))
    assert full.panel == Panel()
    assert full == gradients.GradientStudy(tmp_path, full.console)


def test_tables_are_whole_in_markdown() -> None:
    found = hand()
    for sheet in (means_sheet(found), differences_sheet(found), variance_sheet(found)):
        lines = [line for line in sheet.markdown().splitlines() if line.startswith("|")]
        assert {line.count("|") for line in lines} == {len(sheet.header) + 1}
