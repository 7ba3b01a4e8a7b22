"""The report page in a browser: nothing wider than the window, clipped, overlapping or pale."""

from __future__ import annotations

from pathlib import Path

import pytest

from flops.report.run_page import run_page
from flops.report.run_record import read_record
from tests.support.chromium import measured
from tests.support.recorded_runs import write_run


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_reads_well(width: int, dark: bool, tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "ours"),
        write_run(tmp_path / "texts", "ops-lr", texts=True, learning_rate=3e-4),
        write_run(tmp_path / "mezo", "mezo", steps=400),
    ]
    found = measured(run_page([read_record(run) for run in runs]), width, dark, tmp_path)
    assert found["dark"] is dark
    assert found["client"] <= width
    assert found["scroll"] == found["client"], found["wide"]
    assert not found["wide"]
    assert not found["clipped"]
    assert not found["overlaps"]
    assert not found["small"]
    assert not found["pale"]
