"""`torchrun -m flops finetune`: real processes, one of which dies, and a run that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flops.cli.main import main
from flops.tasks.classification import bundled_vit
from tests.support.launching import torchrun

SETTINGS = ["finetune", "--limit", "36", "--batch", "12", "--queries", "6", "--method", "lr"]
SETTINGS += ["--checkpoint-steps", "1", "--timeout", "30", "--no-plots", "--epochs", "2"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def weights(folder: Path) -> torch.Tensor:
    found = load_file(folder / "model" / "model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


def apart(one: Path, other: Path) -> float:
    """How far two trained models lie apart, of the way that training took.

    Adam makes steps of full length also where a gradient is hardly more than its rounding.
    """
    start = bundled_vit(classes=10).state_dict()
    begin = torch.cat([start[name].flatten() for name in sorted(start)])
    a, b = weights(one), weights(other)
    return float((a - b).norm() / (b - begin).norm())


def flops(*arguments: str, launcher: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flops", *arguments]
    if launcher:
        command = torchrun("-m", "flops", *arguments)
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    main([*SETTINGS, "--output", str(folder)])
    return folder


@pytest.mark.parametrize("parallel", ["data", pytest.param("query", marks=pytest.mark.slow)])
def test_torchrun_trains_what_one_process_trains(
    parallel: str, alone: Path, tmp_path: Path
) -> None:
    given = ["--parallel", parallel, "--output", str(tmp_path / "two")]
    done = flops(*SETTINGS, *given, launcher=True)
    assert done.returncode == 0, done.stderr
    assert apart(tmp_path / "two", alone) < 0.003
    steps = [len((f / "metrics.jsonl").read_text().splitlines()) for f in (tmp_path / "two", alone)]
    assert steps[0] == steps[1]
    assert done.stdout.count("results are in") == 1  # one process speaks
    counts = [load_file(f / "counts.safetensors") for f in (tmp_path / "two", alone)]
    for name, wanted in counts[1].items():
        torch.testing.assert_close(counts[0][name], wanted)


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """With subspaces and allocators that all processes learn together, and a last batch of one."""
    given = ["--limit", "37", "--batch", "12", "--queries", "4", "--epochs", "2", "--no-plots"]
    given += ["--checkpoint-steps", "3", "--output", str(tmp_path / "whole")]
    done = flops("finetune", *given, launcher=True)
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    again = ["--resume", str(tmp_path / "cut"), "--checkpoint", "previous"]
    done = flops("finetune", *again, launcher=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_the_others_stop_when_one_dies_and_the_run_goes_on_alone(
    alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "flops", *SETTINGS, "--output", str(folder)]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
                    stderr=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)  # before the pipes are closed
        deadline = time.monotonic() + 200
        while len(list((folder / "checkpoints").glob("step-*"))) < 2:
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert ranks[0].poll() is None, ranks[0].communicate()[1]
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGKILL)
        _, said = ranks[0].communicate(timeout=90)
    assert ranks[0].returncode == 1
    assert (
        "flops (process 0): process 0 of 2 did not receive a message from the other ranks" in said
    )
    assert "Traceback" not in said
    done = flops("finetune", "--resume", str(folder))
    assert done.returncode == 0, done.stderr
    assert apart(folder, alone) < 0.003


def test_other_commands_are_not_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="torchrun supports `flops finetune`"):
        main(["compare"])
