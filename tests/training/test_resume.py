"""A run that was stopped goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flops.cli.main import main
from flops.errors import FlopsError
from flops.tasks.classification import task as classifying
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.data import images
from flops.tasks.models.vit import load_model
from flops.training import checkpoint as checkpoints
from flops.training import loop
from flops.training.checkpoint import CheckpointError
from flops.training.config import ConfigError
from flops.training.loop import NullDisplay, train
from flops.training.run_directory import RunDirectory, RunDirectoryError, read_settings

KILLS = int(os.environ.get("FLOPS_KILLS", "30"))  # of processes, in the slow test
CLOSE = 5e-2  # see `distance`; the most that was measured is 6e-3, over nine steps elsewhere
SMALL = FinetuneConfig(
    limit=36,
    batch=16,
    queries=8,
    epochs=4,
    evaluate_every=2,
    checkpoint_steps=2,
    checkpoint_seconds=None,
)


def small(**changed: Any) -> FinetuneConfig:
    return SMALL.replace(**changed)


class Stop(Exception):
    pass


class Signal(NullDisplay):
    """Asks the process to stop during a step."""

    def __init__(self, number: signal.Signals, times: int = 1) -> None:
        self.number, self.times = number, times

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        for _ in range(self.times if line["step"] == 3 else 0):
            os.kill(os.getpid(), self.number)


class Stopper(NullDisplay):
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


def flip(file: Path) -> None:
    """Change a bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours: Any, theirs: Any, path: str) -> None:
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        assert ours.stride() == theirs.stride(), path
        assert torch.equal(bits(ours), bits(theirs)), path
    elif isinstance(theirs, dict):
        assert [*ours] == [*theirs], path
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{path}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for i, value in enumerate(theirs):
            assert_same(ours[i], value, f"{path}/{i}")
    else:
        assert ours == theirs, path


def assert_alike(folder: Path, unbroken: Path) -> None:
    assert lines(folder) == lines(unbroken)
    ours, theirs = final(folder), final(unbroken)
    for name, weight in theirs[0].items():
        assert torch.equal(bits(ours[0][name]), bits(weight)), name
    assert_same(ours[1], theirs[1], "state")
    for name, found in load_file(unbroken / "counts.safetensors").items():
        assert torch.equal(load_file(folder / "counts.safetensors")[name], found), name


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    """They take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_curves", "plot_allocation"):
            patch.setattr(loop, name, lambda *_: None)
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
    assert (
        steps[-1]["shaping"]["blocks-3"]["explained_variance"] > 0
    )  # there is something to restore
    place = tmp_path / "run" / "checkpoints"
    weights, state = checkpoints.load(checkpoints.steps(place)[-1])
    state["optimizer"]["state"][3]["exp_avg"].view(torch.int32).flatten()[5] ^= 1
    checkpoints.save(place, 12, weights, state)
    with pytest.raises(AssertionError):  # and the comparison sees a single bit
        assert_alike(tmp_path / "run", unbroken)


@pytest.mark.bits
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
    assert kill(out, moments) >= 4
    assert_alike(out, unbroken)
    assert not list((out / "checkpoints").glob("unfinished-*"))


def kill(out: Path, moments: list[str]) -> int:
    """Train in processes that are killed at these moments, and then to the end; count them."""
    arguments = [json.dumps(small(output=str(out)).to_dict()), *moments]
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.killing", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.bits
def test_killed_at_random_moments(unbroken: Path, tmp_path: Path) -> None:
    """With the same threads and capability: the same bits, however often and whenever."""
    kills, chance = 0, random.Random(20261116)
    for number in itertools.count():
        lines = sorted(chance.randrange(15) for _ in range(10))
        moments = [f"lines {n} {chance.uniform(0, 0.15):.4f}" for n in lines]
        kills += kill(tmp_path / str(number), moments)
        assert_alike(tmp_path / str(number), unbroken)
        if kills >= KILLS:
            break
    print(f"{kills} kills in {number + 1} runs")


def elsewhere(folder: Path, **environment: str) -> str:
    """Resume a run in a process with another environment; what it says."""
    found = subprocess.run(
        [sys.executable, "-m", "flops", "finetune", "--resume", str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def distance(folder: Path, unbroken: Path) -> float:
    """Of the trained weights, relative to how far training moved them."""
    ours, theirs = final(folder)[0], final(unbroken)[0]
    start, _ = load_model("bundled", 10, seed=SMALL.seed)
    first = start.state_dict()
    apart = sum(float((ours[n] - w).double().square().sum()) for n, w in theirs.items())
    moved = sum(float((first[n] - w).double().square().sum()) for n, w in theirs.items())
    return (apart / moved) ** 0.5


@pytest.mark.bits
def test_another_number_of_threads_is_said_and_differs_by_rounding(
    unbroken: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        train(small(output=str(tmp_path)), display=Stopper(7))
    other = "1" if torch.get_num_threads() > 1 else "2"
    said = elsewhere(tmp_path, OMP_NUM_THREADS=other)
    before = torch.get_num_threads()
    assert f"warning: the run was at number of threads {before} (now {other}); it continues" in said
    assert distance(tmp_path, unbroken) < CLOSE


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_another_capability_is_said_and_differs_by_rounding(
    threads: str, capability: str, unbroken: Path, tmp_path: Path
) -> None:
    now = torch.backends.cpu.get_cpu_capability()
    if now.lower() == capability or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"needs another capability than {now}")
    for step in (3, 7, 11):
        folder = tmp_path / str(step)
        with pytest.raises(Stop):
            train(small(output=str(folder)), display=Stopper(step))
        said = elsewhere(folder, OMP_NUM_THREADS=threads, ATEN_CPU_CAPABILITY=capability)
        assert f"CPU capability {now} (now {capability.upper()})" in said
        found = distance(folder, unbroken)
        print(f"{threads} threads, {capability}, from step {step}: {found:.2e}")
        assert found < CLOSE


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
    with pytest.raises(SystemExit, match="leave out --config and --preset"):
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


@pytest.mark.bits
@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "state.json"])
def test_a_flipped_bit_is_noticed_and_the_previous_checkpoint_goes_on(
    name: str, unbroken: Path, tmp_path: Path
) -> None:
    config = small(output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    flip(tmp_path / "checkpoints" / "step-00000006" / name)
    said = f"step-00000006 is damaged: {name} fails its checksum; continuing from step-00000004"
    with pytest.warns(UserWarning, match=said):
        train(config, resume=True)
    assert_alike(tmp_path, unbroken)


@pytest.mark.bits
def test_the_previous_checkpoint_can_be_asked_for(unbroken: Path, tmp_path: Path) -> None:
    config = small(output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    train(config, resume=True, checkpoint="previous")
    assert_alike(tmp_path, unbroken)


def test_two_damaged_checkpoints_are_too_many(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    for step in (4, 6):
        flip(tmp_path / "checkpoints" / f"step-0000000{step}" / "model.safetensors")
    with pytest.raises(CheckpointError, match="There is no other checkpoint: start a new run"):
        train(config, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    assert len(checkpoints.steps(tmp_path / "checkpoints")) == 2  # nothing was put aside


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    place = checkpoints.steps(tmp_path / "checkpoints")[-1]
    document = json.loads((place / "state.json").read_text(encoding="utf-8"))
    text = json.dumps({**document, "schema": 9, "version": "7.1"})
    (place / "state.json").write_text(text, encoding="utf-8")
    sums = json.loads((place / "checksums.json").read_text(encoding="utf-8"))
    sums["state.json"] = hashlib.sha256(text.encode()).hexdigest()
    (place / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has schema 9.* that wrote it \(7.1\)"):
        train(config, resume=True)


def test_a_run_from_before_checkpoints_knew_their_machine(unbroken: Path, tmp_path: Path) -> None:
    config = small(output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    for place in checkpoints.steps(tmp_path / "checkpoints"):
        weights, state = checkpoints.load(place)
        del state["rounding"]
        checkpoints.save(place.parent, int(place.name[5:]), weights, state)
    kept = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    for name in ("torch", "capability"):
        del kept[name]
    (tmp_path / "environment.json").write_text(json.dumps(kept), encoding="utf-8")
    train(config, resume=True)  # without a warning
    assert_alike(tmp_path, unbroken)


def test_settings_of_a_newer_version_are_named(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(small(method="bp", output=str(tmp_path)), display=Stopper(1))
    for name, values in (
        ("config.json", {"warp": 9}),
        ("environment.json", {"packages": {"flops-torch": "7.1"}}),
    ):
        kept = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        (tmp_path / name).write_text(json.dumps({**kept, **values}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'warp'.*config.json, which flops 7.1 wrote; this is"):
        read_settings(tmp_path, FinetuneConfig)


def test_one_process_at_a_time_and_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    run, _ = RunDirectory.reopen(tmp_path)
    with pytest.raises(RunDirectoryError, match="another process"):
        train(config, resume=True)
    run.close()
    with pytest.raises(FlopsError, match="restore the data, or start a new run"):
        train(config.replace(limit=35), resume=True)
    names = ("zero", *map(str, range(1, 10)))

    def renamed(*given: Any, **options: Any) -> images.ImageData:
        return dataclasses.replace(images.load(*given, **options), classes=names)

    with monkeypatch.context() as changed:
        changed.setattr(classifying, "load", renamed)
        with pytest.raises(FlopsError, match="labels or classes"):
            train(config, resume=True)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="shorter than at the checkpoint"):
        train(config, resume=True)
    with pytest.raises(ConfigError, match="to resume, set `output`"):
        train(small(), resume=True)


def test_of_two_runs_that_start_in_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    first = small(seed=1)
    held = RunDirectory.create(tmp_path / "run", first)
    (tmp_path / "run/config.json").rename(tmp_path / "aside")  # the other one looked before it came
    with pytest.raises(RunDirectoryError, match="another process"):
        RunDirectory.create(tmp_path / "run", small(seed=2))
    assert not (tmp_path / "run/config.json").exists()  # its settings are not put over the first's
    held.close()


def test_an_environment_that_is_not_known_is_no_obstacle(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    kept = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps({**kept, "threads": 99}))
    RunDirectory.reopen(tmp_path)[0].close()  # the checkpoint knows better
    place = checkpoints.steps(tmp_path / "checkpoints")[-1]
    weights, state = checkpoints.load(place)
    for change, said in (
        ({"threads": 99}, r"number of threads 99 \(now \d+\); it continues, but differs"),
        ({"capability": "AVX9"}, r"CPU capability AVX9 \(now \w+\)"),
        ({"torch": "1.0"}, r"torch 1.0 \(now"),
    ):
        changed = {**state, "rounding": {**state["rounding"], **change}}
        checkpoints.save(place.parent, 2, weights, changed)
        with pytest.warns(UserWarning, match=said):
            RunDirectory.reopen(tmp_path)[0].close()
    for text in ("{}", "", "[" * 100_000, '{"packages": 1}'):
        (tmp_path / "environment.json").write_text(text)
        with pytest.warns(UserWarning, match=r"numpy None \(now"):
            RunDirectory.reopen(tmp_path)[0].close()
