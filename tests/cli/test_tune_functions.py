"""`flops tune --objective` and `--command`, as a new user gives them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from flops.cli.main import main

DOCS = (Path(__file__).parents[2] / "docs" / "blackbox.md").read_text("utf-8")


def files(folder: Path) -> None:
    """The files of the guide."""
    found = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS, re.DOTALL)
    assert [name for name, _ in found] == ["simulator.py", "simulate.py"]
    for name, code in found:
        (folder / name).write_text(code)


def commands() -> list[list[str]]:
    """The commands of the guide that tune an objective."""
    found = re.findall(r"^flops (tune --(?:objective|command).* --output \S+)$", DOCS, re.MULTILINE)
    assert len(found) == 2
    return [shlex.split(line.replace("python simulate.py", f"{sys.executable} simulate.py"))
            for line in found]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("simulator", None)
    from flops.tasks.tuning.objectives import load

    load.cache_clear()


def results(folder: Path) -> dict[str, dict]:
    return {r["method"]: r for r in json.loads((folder / "results.json").read_text())}


@pytest.mark.slow
def test_the_guides_commands_work(here, capsys) -> None:
    for arguments in commands():
        main(arguments)
        said = capsys.readouterr().out
        folder = Path(arguments[arguments.index("--output") + 1])
        found = results(folder)
        assert found["lr"]["loss"] < 0.7 * found["start"]["loss"]
        assert f"{found['lr']['queries']:,}" in said
        table = (folder / "table.md").read_text("utf-8")
        assert "searched" in table
        assert (folder / "validation.png").read_bytes().startswith(b"\x89PNG")
        best = np.load(folder / "lr-auto-seed0" / "parameters.npy")
        assert json.loads((folder / "lr-auto-seed0" / "parameters.json").read_text()) == [
            pytest.approx(float(value)) for value in best
        ]


SMALL = "tune --objective simulator:losses --dimensions 8 --points 20 --queries 4 --batch 10"


def test_more_budget_or_epochs_go_on_and_end_as_one_long_run(here, capsys) -> None:
    for budget in (500, 900):
        main([*SMALL.split(), "--methods", "lr", "--budget", str(budget), "--output", "a"])
        found = results(here / "a")["lr"]
        assert found["stopped"] == "budget"
        assert budget - 250 < found["queries"] <= budget
    given = [*SMALL.split(), "--methods", "lr", "--epochs", "6"]
    main([*given, "--output", "a"])
    main([*given, "--output", "b"])
    one, other = (np.load(here / name / "lr-auto-seed0" / "parameters.npy") for name in "ab")
    assert np.array_equal(one, other)
    with pytest.raises(SystemExit) as refused:
        main([*SMALL.split(), "--methods", "lr", "--sigma", "0.5", "--output", "a"])
    assert "sigma was 0.01, is 0.5" in str(refused.value)


def test_rows_that_fail_are_counted_and_methods_below_the_start_are_named(here, capsys) -> None:
    (here / "broken.py").write_text(
        "import numpy as np\n"
        "def losses(parameters, points):\n"
        "    found = (parameters**2).sum(1)  # the start is the best there is\n"
        "    return np.where(points == 3, np.nan, found)\n"
    )
    options = "--dimensions 3 --points 8 --queries 4 --methods start lr --step-sizes 0.5"
    more = "--epochs 3 --seeds 2 --retries 0 --output out"
    main(["tune", "--objective", "broken:losses", *options.split(), *more.split()])
    said = capsys.readouterr().out
    assert "lr ends below its start: validation loss" in said
    assert "lr ends below its start" in (here / "out" / "table.md").read_text("utf-8")
    found = results(here / "out")["lr"]
    assert found["failed"] > 3
    assert f"{found['failed']:,} rows failed" in said
    assert found["loss"] == 0.0  # the best parameters on the way are kept
    sys.modules.pop("broken", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "simulator:losses"], "--dimensions N for N zeros"),
        (["--objective", "a:b", "--command", "c {input}"], "either --objective or --command"),
        (["--command", "prog", "--dimensions", "2"], "must contain {input}"),
        (["--objective", "simulator:nothing", "--dimensions", "2"], "has no attribute 'nothing'"),
        (
            ["--objective", "simulator:losses", "--url", "http://127.0.0.1:9"],
            "--url is for prompts",
        ),
        (["--points", "3"], "--points needs --objective or --command"),
        (
            ["--objective", "simulator:losses", "--dimensions", "8", "--methods", "bp"],
            "--methods must be some of start, lr",
        ),
        (
            ["--objective", "simulator:losses", "--dimensions", "8", "--executor", "gpu"],
            "--executor must be threads, processes or the address of a Dask scheduler",
        ),
        (
            ["--objective", "simulator:losses", "--dimensions", "8", "--max-failures", "2"],
            "--max-failures must be from 0 to 1",
        ),
    ],
)
def test_options_that_do_not_fit_are_explained(options, message, here) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *options, "--output", "out"])
    assert message in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("executor", "number"),
    [("threads", signal.SIGTERM), ("threads", signal.SIGINT), ("processes", signal.SIGTERM)],
)
def test_a_program_ends_with_its_tuner_and_all_that_it_started(here, executor, number) -> None:
    (here / "hang.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path('new').write_text(f'{os.getpid()} {child.pid}')\n"
        "pathlib.Path('new').rename('started')\n"
        "time.sleep(60)\n"
    )
    # A process in the background of a shell ignores SIGINT, and so does what it starts.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from flops.cli.main import main; main()"
    command = [sys.executable, "-c", code, "tune"]
    command += ["--command", f"{sys.executable} hang.py {{input}}", "--executor", executor]
    command += ["--dimensions", "3", "--methods", "lr", "--concurrency", "1"]
    deadline = time.monotonic() + 60
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        try:
            while not (here / "started").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "stopped; no evaluation is lost. Continue with: flops" in said
    assert "Traceback" not in said
    for pid in map(int, (here / "started").read_text().split()):
        assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process ends; one that nobody has waited for yet is dead, too."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_budget_below_a_step_is_named(here, capsys) -> None:
    main([*SMALL.split(), "--methods", "lr", "--budget", "60", "--output", "a"])
    said = capsys.readouterr().out
    assert "0 steps (budget)" in said
    assert "lr made no step: the budget does not reach the first" in said


@pytest.mark.parametrize("option", ["sigma", "queries", "step-sizes", "timeout", "price"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_settings_that_are_no_number_are_refused_before_anything_is_paid(
    here, option, value
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*SMALL.split(), f"--{option}", value])
    assert f"--{option} must be" in str(refused.value)
    assert not (here / "runs").exists()
