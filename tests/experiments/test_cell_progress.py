"""What is shown of long work: the plan, a line a run, the time to go, warnings by kind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from flops.experiments.cell_progress import CellProgress, about, varied, warn_grouped
from flops.experiments.cells import Cell, run_cells


@dataclass(frozen=True)
class Run:
    method: str = "lr"
    rate: float = 1e-3
    seed: int = 0


def measure(run: Run) -> dict[str, float]:
    warnings.warn(f"rate {run.rate} is low", stacklevel=1)
    warnings.warn("for developers", DeprecationWarning, stacklevel=1)
    if run.seed == 2:
        raise ValueError("seed")
    return {"accuracy": 0.5}


def shown(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_line_for_every_finished_run(tmp_path: Path) -> None:
    cells = [Cell("part", measure, Run(m, r)) for m in ("lr", "mezo") for r in (1e-3, 1e-2)]
    console = shown()
    with pytest.warns(UserWarning, match=r"rate 0\.001 is low \(in 4 runs\)") as caught:
        run_cells(
            cells, tmp_path, 0, console, "part", describe=lambda r: f"accuracy {r['accuracy']}"
        )
    assert len(caught) == 1  # of one kind, and none for developers
    first, *rest = lines(console)
    assert first == "part: 4 runs; how long they take is known when the first has finished"
    assert rest[0] == "part 1/4: lr, rate 0.001: accuracy 0.5 (0 s); about a few seconds left"
    assert rest[-1] == "part 4/4: mezo, rate 0.01: accuracy 0.5 (0 s)"
    again = shown()
    run_cells(cells, tmp_path, 0, again, "part")
    assert lines(again) == []  # nothing to do, nothing to say


def test_saved_runs_make_the_estimate(tmp_path: Path) -> None:
    cells = [Cell("part", measure, Run(m, seed=s)) for m in ("lr", "mezo") for s in range(4)]
    for cell in cells:
        if cell.settings.seed == 0:
            cell.save(tmp_path, {}, 60 if cell.settings.method == "lr" else 600)
    known = {"lr": [60.0], "mezo": [600.0]}
    left = [cell.settings for cell in cells if cell.settings.seed]
    every = [cell.settings for cell in cells]
    progress = CellProgress(shown(), "part", every, left, known, 2)
    # 3 of 60 seconds and 3 of 600, two at a time.
    assert progress.plan() == "part: 6 runs, 2 saved before, 2 at a time, about 16 minutes"
    assert cells[0].seconds(tmp_path) == 60
    assert cells[1].seconds(tmp_path) is None
    with progress:
        progress.finished(left[-1], 1200.0, {})
    assert progress.to_go() == "about 16 minutes left"  # 3 of 60 and 2 of 900, by two


def test_a_terminal_shows_the_time_to_go(tmp_path: Path) -> None:
    console = shown(terminal=True)
    every = [Run(seed=s) for s in range(3)]
    with CellProgress(console, "part", every, every, {}, 1) as progress:
        progress.finished(every[0], 200.0, {})
    text = "\n".join(lines(console))
    assert "about 7 minutes left" in text
    assert "1/3" in text
    assert "part 1/3" not in text  # no line beside the bar


def test_failed_runs_are_lines_too(tmp_path: Path) -> None:
    cells = [Cell("part", measure, Run(seed=s)) for s in (1, 2)]
    console = shown()
    with pytest.warns(UserWarning, match="is low"), pytest.raises(Exception, match="1 of 2 cells"):
        run_cells(cells, tmp_path, 0, console, "part")
    assert lines(console)[-1] == "part 2/2: seed 2: failed"


def test_old_results_without_seconds_are_loaded(tmp_path: Path) -> None:
    cell = Cell("part", measure, Run())
    cell.save(tmp_path, {"accuracy": 1.0})
    assert "seconds" not in json.loads(cell.path(tmp_path).read_text())
    assert cell.load(tmp_path) == {"accuracy": 1.0}
    assert cell.seconds(tmp_path) is None


def test_warnings_of_several_kinds() -> None:
    with pytest.warns(UserWarning, match="runs") as caught:
        warn_grouped([("a 1", "b"), ("a 2",), ("a 3", "b"), ()])
    assert [str(w.message) for w in caught] == ["a 1 (in 3 runs)", "b (in 2 runs)"]


def test_durations_are_rounded() -> None:
    found = [about(s) for s in (3, 44, 99, 2400, 7200)]
    assert found == ["a few seconds", "40 seconds", "100 seconds", "40 minutes", "2.0 hours"]
    assert varied([Run(), Run(seed=1)]) == ["seed"]
    assert varied([]) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_at_once_and_says_how_to_go_on(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    command = "compare --methods bp --seeds 1 --learning-rates 1e-3 --epochs 500 --workers 1"
    program = textwrap.dedent(
        f"""
        import signal
        from flops.cli.main import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        if __name__ == "__main__":
            main({[*command.split(), "--budget", "1", "--output", "out"]!r})
        """
    )
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    request.addfinalizer(ran.kill)
    assert ran.stdout is not None
    assert ran.stdout.readline().startswith("plan: 1 method with 1 seed")
    assert ran.stdout.readline().startswith("reported runs: 1 run;")
    ran.send_signal(signal.SIGINT)
    _, said = ran.communicate(timeout=300)
    assert ran.returncode == 1
    assert said.strip() == (
        f"stopped; finished runs are saved. Continue with: flops {command} --budget 1 --output out"
    )
