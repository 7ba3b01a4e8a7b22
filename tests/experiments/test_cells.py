"""Cells of a study that are kept and resumed, intervals over seeds, tables."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flops.errors import FlopsError
from flops.experiments.cells import Cell, run_cells
from flops.report.intervals import interval, paired, t_quantile
from flops.report.table import Sheet
from flops.training.loop import peak_memory

QUIET = Console(quiet=True)


@dataclass(frozen=True)
class Settings:
    value: float | str = 1.0
    seed: int = 0


def double(settings: Settings) -> dict[str, float]:
    assert isinstance(settings.value, float)
    if settings.value < 0:
        raise ValueError("negative")
    return {"found": 2 * settings.value, "threads": torch.get_num_threads()}


def memory(settings: Settings) -> dict[str, float]:
    return {"peak": peak_memory()}


def refuse(settings: Settings) -> dict[str, float]:
    raise AssertionError("a finished cell was run again")


# Quantiles of Student's t from printed tables.
@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [(1, 0.95, 12.7062), (4, 0.95, 2.77645), (4, 0.99, 4.60409), (30, 0.95, 2.04227)],
)
def test_t_quantile(freedom: int, level: float, expected: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(expected, rel=1e-5)


def test_intervals() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.spread == pytest.approx(math.sqrt(2.5))
    assert found.half == pytest.approx(2.77645 * math.sqrt(2.5 / 5), rel=1e-5)
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)
    assert interval([2.0]).shown() == "2.000"
    difference = paired([1.0, 2.0, 4.0], [0.0, 1.0, 2.0])
    assert difference.mean == pytest.approx(4 / 3)
    assert difference.spread == pytest.approx(math.sqrt(1 / 3))
    assert difference.shown(2, sign=True) == "+1.33 ± 1.43"
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_intervals_cover_as_often_as_they_say() -> None:
    draws = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0)).tolist()
    covered = sum(abs(found.mean) < found.half for found in map(interval, draws)) / 2000
    assert abs(covered - 0.95) < 5 * math.sqrt(0.95 * 0.05 / 2000)


def test_cells_are_kept_and_not_run_again(tmp_path: Path) -> None:
    cells = [Cell("part", double, Settings(v, seed=s)) for v in (2.0, 3.0) for s in (0, 1)]
    found = run_cells(cells, tmp_path, 0, QUIET, "part")
    assert [r["found"] for r in found] == [4, 4, 6, 6]
    names = sorted(p.name for p in (tmp_path / "cells" / "part").iterdir())
    assert names == [f"value={v},seed={s}.json" for v in (2.0, 3.0) for s in (0, 1)]
    again = [Cell("part", refuse, cell.settings) for cell in cells]
    assert run_cells(again, tmp_path, 0, QUIET, "part") == found
    # Neither a torn file nor one of other settings counts.
    cells[0].path(tmp_path).write_text('{"settings": {"val')
    kept = json.loads(cells[1].path(tmp_path).read_text())
    cells[1].path(tmp_path).write_text(json.dumps({**kept, "settings": {"value": 9.0, "seed": 1}}))
    assert cells[0].load(tmp_path) is None
    assert cells[1].load(tmp_path) is None
    assert run_cells(cells, tmp_path, 0, QUIET, "part") == found


def test_a_failed_cell_does_not_lose_the_others(tmp_path: Path) -> None:
    cells = [Cell("part", double, Settings(v)) for v in (-1.0, 2.0)]
    with pytest.raises(FlopsError, match=r"1 of 2 cells.*value=-1\.0.*negative"):
        run_cells(cells, tmp_path, 0, QUIET, "part")
    assert cells[1].load(tmp_path) is not None


def test_cells_run_in_processes_of_one_thread(tmp_path: Path) -> None:
    cells = [Cell("part", double, Settings(2.0))]
    assert run_cells(cells, tmp_path, 1, QUIET, "part") == [{"found": 4.0, "threads": 1}]


def test_results_stay_below_their_folder(tmp_path: Path) -> None:
    for data in ("a/../../../../../escaped", "x" * 300, "../photos", "/an/absolute/folder"):
        cell = Cell("part", double, Settings(data))
        cell.save(tmp_path / "out", {"found": 1})
        assert cell.load(tmp_path / "out") == {"found": 1}
        assert (tmp_path / "out/cells/part") in cell.path(tmp_path / "out").resolve().parents
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_of_files_are_such_that_every_system_takes_them(tmp_path: Path) -> None:
    names = {Cell("part", double, Settings(v)).path(tmp_path).name for v in ("a:b", "a/b", "a-b")}
    assert len(names) == 3
    assert not any(set('<>:"/\\|?*') & set(name) for name in names)


@pytest.mark.parametrize("data", ["random:vit", "user/set"])
def test_results_under_names_of_older_versions_are_found(tmp_path: Path, data: str) -> None:
    cell = Cell("part", double, Settings(data))
    cell.save(tmp_path, {"found": 1})
    old = tmp_path / "cells/part" / f"{cell.name}.json"
    old.parent.mkdir(exist_ok=True)
    cell.path(tmp_path).rename(old)
    assert cell.load(tmp_path) == {"found": 1}
    cell.forget(tmp_path)
    assert cell.load(tmp_path) is None
    assert not old.exists()


def test_the_peak_memory_of_a_process_is_its_own(tmp_path: Path) -> None:
    here = torch.ones(2**28)  # 1 GiB of the parent
    cells = [Cell("part", memory, Settings(1.0))]
    (found,) = run_cells(cells, tmp_path, 1, QUIET, "part", fresh=True)
    assert 2**25 < found["peak"] < here.nbytes < peak_memory()


def test_sheet_as_markdown() -> None:
    sheet = Sheet("Title", ["a", "b"], [["x", "1"]], "Note.")
    assert sheet.markdown() == "### Title\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nNote.\n"
    assert sheet.table().row_count == 1
