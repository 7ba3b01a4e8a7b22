"""A run that was stopped goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flops import checkpoints, classifying, results
from flops.checkpoints import CheckpointError
from flops.cli import main
from flops.errors import FlopsError
from flops.options import Config, ConfigError
from flops.runs import RunFolder, RunFolderError
from flops.tasks import images
from flops.training import Silence, train
from flops.trees import encode

SMALL = Config(
    limit=36,
    batch=16,
    queries=8,
    epochs=4,
    evaluate_every=2,
    checkpoint_steps=2,
    checkpoint_seconds=None,
)


def small(**changed: Any) -> Config:
    return dataclasses.replace(SMALL, **changed)


class Stop(Exception):
    pass


class Signal(Silence):
    """Asks the process to stop during a step."""

    def __init__(self, number: signal.Signals, times: int = 1) -> None:
        self.number, self.times = number, times

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        for _ in range(self.times if line["step"] == 3 else 0):
            os.kill(os.getpid(), self.number)


class Stopper(Silence):
    """Breaks a run off after a step."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        if line["step"] == self.last:
            raise Stop


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found]


def final(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    weights, state = checkpoints.load(checkpoints.steps(folder / "checkpoints")[-1])
    state["progress"]["seconds"] = 0
    state["progress"]["evaluations"] = [
        {**e, "seconds": 0} for e in state["progress"]["evaluations"]
    ]
    del state["metrics"]  # a length that seconds are part of
    return weights, state


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_alike(folder: Path, unbroken: Path) -> None:
    assert lines(folder) == lines(unbroken)
    ours, theirs = final(folder), final(unbroken)
    for name, weight in theirs[0].items():
        assert torch.equal(bits(ours[0][name]), bits(weight)), name
    (values, tensors), (expected, others) = encode(ours[1]), encode(theirs[1])
    assert values == expected
    for name, tensor in others.items():
        assert torch.equal(bits(tensors[name]), bits(tensor)), name
    for name, found in load_file(unbroken / "counts.safetensors").items():
        assert torch.equal(load_file(folder / "counts.safetensors")[name], found), name


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    """They take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_curves", "plot_allocation"):
            patch.setattr(results, name, lambda *_: None)
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(small(output=str(folder)))
    return folder


@pytest.mark.bits
def test_an_unbroken_run_learns_and_repeats_itself(unbroken: Path, tmp_path: Path) -> None:
    train(small(output=str(tmp_path / "run")))
    assert_alike(tmp_path / "run", unbroken)
    steps = [line for line in lines(unbroken) if line["kind"] == "step"]
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["shaping"]["blocks-3"]["captured"] > 0  # there is something to restore
    place = tmp_path / "run" / "checkpoints"
    weights, state = checkpoints.load(checkpoints.steps(place)[-1])
    state["optimizer"]["state"][3]["exp_avg"].view(torch.int32).flatten()[5] ^= 1
    checkpoints.save(place, 12, weights, state)
    with pytest.raises(AssertionError):  # and the comparison sees a single bit
        assert_alike(tmp_path / "run", unbroken)


def test_killed_processes(unbroken: Path, tmp_path: Path) -> None:
    """SIGKILL before anything is there, in and between steps, and while checkpoints are written."""
    out = tmp_path / "run"
    moments = [
        "seconds 0.05",
        "lines 1",
        "lines 3",
        "writing 1",
        "lines 8",
        "writing 2",
        "lines 14",
    ]
    arguments = [json.dumps(small(output=str(out)).to_dict()), *moments]
    found = subprocess.run(
        [sys.executable, "-m", "tests.killing", *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[-1]) >= 4
    assert_alike(out, unbroken)
    assert not list((out / "checkpoints").glob("unfinished-*"))


@pytest.mark.parametrize("method", ["bp", "mezo", "ops-lr", "ops-spsa"])
@pytest.mark.bits
def test_every_kind_of_state_is_restored(method: str, tmp_path: Path) -> None:
    whole, broken = (
        small(method=method, queries=4, epochs=2, limit=24, output=str(tmp_path / name))
        for name in ("whole", "broken")
    )
    train(whole)
    with pytest.raises(Stop):
        train(broken, display=Stopper(3))
    train(broken, resume=True)
    assert_alike(tmp_path / "broken", tmp_path / "whole")


def test_the_command_line_resumes(unbroken: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stop):
        train(small(output=str(out)), display=Stopper(11))  # some points are not seen again
    with pytest.raises(SystemExit, match="keeps its settings: leave out epochs, or start"):
        main(["finetune", "--resume", str(out), "--epochs", "5"])
    moved = out.rename(tmp_path / "moved")
    main(["finetune", "--resume", str(moved)])
    assert "from step 10" in capsys.readouterr().out
    assert_alike(moved, unbroken)
    before = (moved / "metrics.jsonl").read_bytes()
    main(["finetune", f"--resume={moved}"])  # nothing is left to do
    assert (moved / "metrics.jsonl").read_bytes() == before
    with pytest.raises(SystemExit, match="holds no run"):
        main(["finetune", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit, match="leave --config and --preset"):
        main(["finetune", "--resume", str(moved), "--preset", "tiny"])


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)]
)
def test_asked_to_stop(number: signal.Signals, times: int, tmp_path: Path) -> None:
    """The running step is kept, unless one insists."""
    config, before = small(method="bp", output=str(tmp_path)), signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(config, display=Signal(number, times))
    found = [path.name for path in checkpoints.steps(tmp_path / "checkpoints")]
    assert found == ["step-00000002", "step-00000003"][: 3 - times]
    assert signal.getsignal(number) is before
    assert train(config, resume=True).steps == 12


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_goes_on(
    unbroken: Path, tmp_path: Path
) -> None:
    config = small(output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    damaged = tmp_path / "checkpoints" / "step-00000006" / "state.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="step-00000004 is whole: add --checkpoint previous"):
        train(config, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    train(config, resume=True, checkpoint="previous")
    assert_alike(tmp_path, unbroken)


def test_one_process_at_a_time_and_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    run, _ = RunFolder.reopen(tmp_path)
    with pytest.raises(RunFolderError, match="another process"):
        train(config, resume=True)
    run.close()
    with pytest.raises(FlopsError, match="restore the data, or start a new run"):
        train(dataclasses.replace(config, limit=35), resume=True)
    names = ("zero", *map(str, range(1, 10)))

    def renamed(*given: Any, **options: Any) -> images.ImageData:
        return dataclasses.replace(images.load(*given, **options), classes=names)

    with monkeypatch.context() as changed:
        changed.setattr(classifying, "load", renamed)
        with pytest.raises(FlopsError, match="labels or classes"):
            train(config, resume=True)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="shorter than at the checkpoint"):
        train(config, resume=True)
    with pytest.raises(ConfigError, match="resume needs the run folder"):
        train(small(), resume=True)


def test_of_two_runs_that_start_in_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    first = small(seed=1)
    held = RunFolder.create(tmp_path / "run", first)
    (tmp_path / "run/config.json").rename(tmp_path / "aside")  # the other one looked before it came
    with pytest.raises(RunFolderError, match="another process"):
        RunFolder.create(tmp_path / "run", small(seed=2))
    assert not (tmp_path / "run/config.json").exists()  # its settings are not put over the first's
    held.close()


def test_an_environment_that_is_not_known_is_no_obstacle(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    kept = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps({**kept, "threads": 99}))
    with pytest.warns(UserWarning, match=r"start of the run: threads \(99, now \d+\); what"):
        RunFolder.reopen(tmp_path)[0].close()
    (tmp_path / "environment.json").write_text("{}")
    with pytest.warns(UserWarning, match="other versions than at the start"):
        RunFolder.reopen(tmp_path)[0].close()
