"""`flops` commands in processes that start fast: forks of one that has imported the libraries.

A fork is a process of its own: it can be killed, and has a limit of open files, standard output and
errors of its own. Number of threads and CPU capability are those of the first process. Run as
``python -m tests.support.forked FD``: each message on the socket is a command.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import flops

HELD = sys.platform == "linux"  # elsewhere forks of large libraries are not safe


class Fork:
    """A process with the part of `subprocess.Popen` that tests use."""

    def __init__(self, status: socket.socket, stdout: IO[str]) -> None:
        self._status, self.stdout = status, stdout
        said = status.recv(64)
        if not said:
            raise RuntimeError("the process that services are forks of has ended; see its stderr")
        self.pid = int(said)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("flops", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64))
            except (BlockingIOError, TimeoutError):
                return None
            self._status.close()
        return self.returncode


def start(
    command: Sequence[str], environment: Mapping[str, str], errors: IO[Any], descriptors: int | None
) -> Fork | subprocess.Popen[str]:
    """``flops COMMAND`` in a process, with a pipe for its output.

    Args:
        command: Without the name of the program.
        environment: All of it.
        errors: File for what it says.
        descriptors: Limit of open files, which it cannot raise.
    """
    if not HELD:
        return subprocess.Popen(
            [sys.executable, "-m", "flops", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(environment),
            preexec_fn=partial(_limit, descriptors) if descriptors else None,
        )
    request = {"command": list(command), "environment": dict(environment), "folder": os.getcwd()}
    request["descriptors"] = descriptors
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    handed = [write, errors.fileno(), theirs.fileno()]
    socket.send_fds(_first(), [json.dumps(request).encode()], handed)
    os.close(write)
    theirs.close()
    return Fork(ours, os.fdopen(read, encoding="utf-8"))


@cache
def _first() -> socket.socket:
    """A socket to the process that is forked; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    places = [str(Path(flops.__file__).parents[1]), str(Path(__file__).parents[2])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(commands: socket.socket) -> None:
    """Fork for every command: a process that waits for it, and the command's own."""
    import torch

    from flops.tasks.models.clip import PromptedClip

    # A fork inherits no threads: torch and the tokenizers must not have started any.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    import flops.cli.main
    import flops.serve.server
    import flops.serve.service  # noqa: F401

    PromptedClip.load()  # and what it imports
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        message, handed, _, _ = socket.recv_fds(commands, 1 << 20, 3)
        if not message:
            return
        out, err, status = handed
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            commands.close()
            child = os.fork()
            if child == 0:
                os.close(status)
                become(json.loads(message), out, err)
                return
            os.close(out)
            os.close(err)
            os.write(status, str(child).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(status, str(code).encode())
            os._exit(0)
        for number in (out, err, status):
            os.close(number)


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Turn this process into that of the command."""
    from flops.cli.main import main

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, place in ((out, 1), (err, 2)):
        os.dup2(number, place)
        os.close(number)
    if request["descriptors"]:
        _limit(request["descriptors"])
    sys.argv = ["flops", *request["command"]]
    main()


def _limit(descriptors: int) -> None:
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
