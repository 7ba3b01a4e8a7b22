"""One of several processes raises, is killed or stopped: the others say which, and why."""

from __future__ import annotations

import os
import random
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
from torch import Tensor

from tests.support.ranks import command


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def run(how: str, parallel: str) -> str:
    """What rank 0 said when rank 1 failed, long before the timeout of the group (10 minutes)."""
    program, environment = command("tests.support.failing_ranks", how, parallel)
    ran = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, timeout=200)
    assert ran.returncode == 3
    (said,) = (line for line in ran.stdout.splitlines() if line.startswith("0|"))
    rank, step, error, text = said.split("|", 3)
    assert (rank, step, error) == ("0", "2", "WorkerError")
    return text


@pytest.mark.parametrize(
    ("how", "parallel", "reason"),
    [
        ("raises", "data", "process 1 failed: ZeroDivisionError: of my own making"),
        ("dies", "data", "process 0 of 2 did not receive a message from the other ranks"),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                ("raises", "query", "process 1 failed: ZeroDivisionError: of my own making"),
                ("nan", "data", "process 1 failed: NonFiniteLossError: "),
                ("stops", "data", "process 1 failed: no sign of life for 6 s: it was stopped"),
            )
        ),
    ],
)
def test_the_others_say_which_failed_and_why(how: str, parallel: str, reason: str) -> None:
    assert reason in run(how, parallel)


SETTINGS = ["finetune", "--limit", "36", "--batch", "12", "--queries", "6", "--method", "lr"]
SETTINGS += ["--epochs", "3", "--checkpoint-steps", "1", "--timeout", "60", "--no-plots"]


def agents(count: int, *command: str) -> list[list[str]]:
    """Commands of one torchrun with two processes, or of two with one each, as on two hosts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=8"]
    if count == 1:
        return [[*launcher, "--standalone", "--nproc-per-node=2", *command]]
    shared = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=kills"]
    shared.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    return [[*launcher, *shared, *command] for _ in range(count)]


def workers(process: int) -> list[int]:
    """Processes that a process has started."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(child) for child in found.split()]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_survives_kills_at_random_moments(count: int, tmp_path: Path) -> None:
    """A process is killed twice; torchrun starts all again, and the result has the same bits."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    for output, kills in ((whole, 0), (folder, 2)):
        given = ["-m", "flops", *SETTINGS, "--output", str(output)]
        with ExitStack() as stack:
            started = []
            for command in agents(count, *given):
                popen = subprocess.Popen(
                    command, env=environment, stderr=subprocess.PIPE, text=True
                )
                started.append(stack.enter_context(popen))
                stack.callback(popen.kill)
            source, deadline = random.Random(7), time.monotonic() + 900
            for kill in range(kills):
                while newest(output) < 2 * kill + 2:
                    assert time.monotonic() < deadline, "no checkpoint was written"
                    time.sleep(0.05)
                time.sleep(source.random())
                alive = [w for popen in started for w in workers(popen.pid)]
                if alive:
                    os.kill(source.choice(alive), signal.SIGKILL)
                time.sleep(3)
            said = [popen.communicate(timeout=900)[1] for popen in started]
            assert [popen.returncode for popen in started] == [0] * count, said
    for name, wanted in weights(whole).items():
        assert torch.equal(weights(folder)[name], wanted)


def newest(folder: Path) -> int:
    """Step of the last checkpoint."""
    found = sorted((folder / "checkpoints").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0
