"""Results that are kept in docs/data are found by this version: hours of runs are not lost."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from flops.experiments.cells import Cell
from flops.experiments.compare_runs import TextComparisonRun, measure

DATA = Path(__file__).parents[2] / "docs" / "data"
SAVED = sorted(DATA.glob("compare-*/cells/*/*.json"))


@pytest.mark.skipif(not SAVED, reason="no results are kept")
def test_saved_cells_are_found() -> None:
    for path in SAVED:
        kept = json.loads(path.read_text(encoding="utf-8"))
        settings = {n: tuple(v) if isinstance(v, list) else v for n, v in kept["settings"].items()}
        assert settings.keys() <= {field.name for field in fields(TextComparisonRun)}
        cell = Cell(path.parent.name, measure, TextComparisonRun(**settings))
        assert cell.path(path.parents[2]) == path
        assert cell.load(path.parents[2]) == kept["result"]
