"""A disk that fills up: training goes on, says so once, and what was kept before stays whole."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flops.cli.main import main
from flops.experiments.cells import Cell, run_cells
from flops.storage.disk import DiskError, filling
from flops.tasks.classification.config import FinetuneConfig
from flops.training import checkpoint as checkpoints
from flops.training.loop import NullDisplay, train
from tests.support.resuming import assert_alike

pytest.importorskip("resource")  # which limits the size of files
import resource

SMALL = FinetuneConfig(
    method="bp",
    limit=36,
    batch=16,
    epochs=4,
    checkpoint_steps=2,
    checkpoint_seconds=None,
    plots=False,
)
SMALLEST = 100_000  # bytes: less than a checkpoint, more than metrics
Switch = Callable[[bool], None]


class Between(NullDisplay):
    """The disk is full after one step, and has room again after another."""

    def __init__(self, full: Switch, first: int, last: int = 10**9) -> None:
        self.full, self.first, self.last = full, first, last

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        if line["step"] in (self.first, self.last):
            self.full(line["step"] == self.first)


@pytest.fixture(params=["limit", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Switch]]:
    """A folder, and a switch that leaves no room in it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "limit":  # every system has it: files may not grow beyond a size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        yield (
            folder,
            lambda on: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALLEST if on else soft, hard)),
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs the right to mount a small disk")
    ballast = folder / "ballast"

    def full(on: bool) -> None:
        if not on:
            ballast.unlink()
            return
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    yield folder, full
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(SMALL.replace(output=str(folder)))
    return folder


def left_overs(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("unfinished-*")]


def test_training_goes_on_and_writes_again(disk: tuple[Path, Switch], unbroken: Path) -> None:
    folder, full = disk
    config = SMALL.replace(output=str(folder / "run"))
    with pytest.warns(UserWarning, match="cannot write") as said:
        train(config, display=Between(full, 3, 8))
    (message,) = (str(w.message) for w in said)  # once
    assert message.startswith(f"cannot write to {folder / 'run'}: ")
    assert "training continues" in message
    assert "would continue from step-00000002" in message
    assert_alike(folder / "run", unbroken)
    assert not left_overs(folder)


def test_a_disk_that_stays_full_ends_in_a_sentence(
    disk: tuple[Path, Switch], unbroken: Path
) -> None:
    folder, full = disk
    config = SMALL.replace(output=str(folder / "run"))
    with (
        pytest.warns(UserWarning, match="training continues"),
        pytest.raises(
            DiskError, match=r"its end is not saved: free some space and .*from step-00000004"
        ),
    ):
        train(config, display=Between(full, 5))
    full(False)
    assert not left_overs(folder)
    for path in checkpoints.steps(folder / "run" / "checkpoints"):
        checkpoints.load(path)  # whole
    train(config, resume=True)
    assert_alike(folder / "run", unbroken)


def test_the_command_ends_with_a_sentence_and_an_error(disk: tuple[Path, Switch]) -> None:
    """Results that cannot be written: the run is kept, nothing looks like a whole model."""
    folder, full = disk
    given = ["--method", "bp", "--limit", "24", "--epochs", "1", "--no-plots"]
    given += ["--output", str(folder / "run")]
    main(["finetune", *given])
    shutil.rmtree(folder / "run" / "model")
    full(True)
    said = r"flops: cannot write to .*run: .*free some space and res"
    with pytest.raises(SystemExit, match=said):
        main(["finetune", "--resume", str(folder / "run")])  # nothing is left but the results
    full(False)
    assert not (folder / "run" / "model").exists()
    assert not left_overs(folder)
    main(["finetune", "--resume", str(folder / "run")])
    assert (folder / "run" / "model" / "model.safetensors").is_file()


def test_files_of_others_stay_where_results_are_written(tmp_path: Path) -> None:
    with filling(tmp_path / "model", last="b") as scratch:
        for name in "ba":
            (scratch / name).write_text("1", encoding="utf-8")
    (tmp_path / "model" / "mine").write_text("2", encoding="utf-8")
    scratch.mkdir()  # left by a process that was killed
    with pytest.raises(OSError), filling(tmp_path / "model", last="b") as scratch:
        (scratch / "no" / "a").write_text("3", encoding="utf-8")
    found = {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "model").iterdir()}
    assert found == {"a": "1", "b": "1", "mine": "2"}
    assert not left_overs(tmp_path)


@dataclass(frozen=True)
class Setting:
    number: int
    seed: int = 0


SWITCH: list[Switch] = []  # a cell finds it here


def measure(setting: Setting) -> dict[str, Any]:
    if setting.number in (1, 3):
        SWITCH[0](setting.number == 1)
    return {"text": "x" * 2 * SMALLEST, "number": setting.number}


@pytest.mark.parametrize("count", [5, 3])
def test_results_of_a_study_are_written_when_there_is_room(
    count: int, disk: tuple[Path, Switch]
) -> None:
    folder, full = disk
    SWITCH[:] = [full]
    cells = [Cell("part", measure, Setting(number)) for number in range(count)]
    console = Console(file=sys.stderr)
    if count == 5:  # there is room again at the fourth
        with pytest.warns(UserWarning, match="the study continues") as said:
            found = run_cells(cells, folder, 0, console, "test")
        assert len(said) == 1
        assert [one["number"] for one in found] == [0, 1, 2, 3, 4]
    else:
        with (
            pytest.warns(UserWarning, match="the study continues"),
            pytest.raises(
                DiskError, match=r"cannot write 2 of 3 results to .*: .*; free some space"
            ),
        ):
            run_cells(cells, folder, 0, console, "test")
        full(False)
        assert [cell.load(folder) is not None for cell in cells] == [True, False, False]
    assert not left_overs(folder)
