"""One of several processes raises, is killed or stopped: the others say which, and why."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.hosts import Host, two_hosts
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


def agents(hosts: Sequence[Host | None], *command: str, restarts: int = 8) -> list[list[str]]:
    """Commands of one torchrun with two processes, or of two with one each: None is this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}"]
    if len(hosts) == 1:
        return [[*launcher, "--standalone", "--nproc-per-node=2", *command]]
    address = "127.0.0.1" if hosts[0] is None else hosts[0].address
    shared = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=kills"]
    shared.append(f"--rdzv-endpoint={address}:{free_port()}")
    found = []
    for number, host in enumerate(hosts):
        if host is None:
            found.append([*launcher, *shared, *command])
        else:
            own = [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={host.address}"]
            found.append(host.command(*launcher, *shared, *own, *command))
    return found


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
@pytest.mark.parametrize("where", ["one agent", "two agents", "two hosts"])
def test_a_run_survives_kills_at_random_moments(where: str, tmp_path: Path) -> None:
    """A process is killed twice; torchrun starts all again, and the result has the same bits."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    for output, kills in ((whole, 0), (folder, 2)):
        given = ["-m", "flops", *SETTINGS, "--output", str(output)]
        with ExitStack() as stack:
            hosts, killed = hosts_for(stack, where), 0
            started = [start(stack, command) for command in agents(hosts, *given)]
            source, deadline = random.Random(7), time.monotonic() + 900
            for kill in range(kills):
                while newest(output) < 2 * kill + 2:
                    assert time.monotonic() < deadline, "no checkpoint was written"
                    time.sleep(0.05)
                time.sleep(source.random())
                alive = [w for popen in started for w in workers(popen.pid)]
                if alive:  # else they are being started again
                    os.kill(source.choice(alive), signal.SIGKILL)
                    killed += 1
                time.sleep(3)
            said = [popen.communicate(timeout=900)[1] for popen in started]
            assert killed > 0 or not kills
            assert [popen.returncode for popen in started] == [0] * len(hosts), said
    for name, wanted in weights(whole).items():
        assert torch.equal(weights(folder)[name], wanted)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
def test_both_hosts_say_that_they_are_cut_off_from_each_other(tmp_path: Path) -> None:
    """No connection is closed: one sees no sign of life, the other no answer of the store."""
    given = ["-m", "flops", *SETTINGS, "--epochs", "1000", "--output", str(tmp_path / "run")]
    logs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    with ExitStack() as stack:
        hosts = [host for host in hosts_for(stack, "two hosts") if host is not None]
        for command, log in zip(agents(hosts, *given, restarts=0), logs, strict=True):
            start(stack, command, stack.enter_context(log.open("w")))
        deadline = time.monotonic() + 300
        while newest(tmp_path / "run") < 6:
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.1)
        hosts[0].unplug()
        deadline = time.monotonic() + 60
        wanted = ["process 1 failed: no sign of life", "cut off from that of process 0"]
        for log, reason in zip(logs, wanted, strict=True):
            while reason not in log.read_text(encoding="utf-8"):
                assert time.monotonic() < deadline, f"after a minute not yet: {reason}"
                time.sleep(0.5)


def hosts_for(stack: ExitStack, where: str) -> list[Host | None]:
    """Where agents run; skips the test if this machine cannot have two hosts."""
    if where != "two hosts":
        return [None] * (1 if where == "one agent" else 2)
    try:
        return [*stack.enter_context(two_hosts())]
    except PermissionError as error:
        pytest.skip(str(error))


def start(stack: ExitStack, command: list[str], log: Any = subprocess.PIPE) -> Any:
    """Start an agent, which ends with the stack, and its workers with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, env=environment, stderr=log, text=True)
    stack.enter_context(popen)
    stack.callback(end, popen)
    return popen


def end(popen: Any) -> None:
    """End an agent that still runs, and its workers, which it could not end any more."""
    if popen.poll() is None:
        popen.send_signal(signal.SIGSTOP)  # else it starts others
        for process in [*workers(popen.pid), popen.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def newest(folder: Path) -> int:
    """Step of the last checkpoint."""
    found = sorted((folder / "checkpoints").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0
