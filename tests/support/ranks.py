"""Ranks of a process group as forks of one process, which has imported the libraries."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # by the first traced pass, else on every rank
import torch.distributed as dist

import flops

TIMEOUT = timedelta(seconds=60)  # below that of the tests, so that torch says what is wrong


def command(module: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """How to start a module that calls `start`, and its environment."""
    places = [str(Path(flops.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    return [sys.executable, "-m", module, *map(str, arguments)], environment


def start(
    main: Callable[[], None],
    processes: int,
    end_with_first: bool = False,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Run a function on every rank, and exit; with the code of rank 0, which ends all, if asked."""
    torch.set_num_threads(1)  # a fork inherits no threads
    pipes = [os.pipe() for _ in range(1, processes)]  # rank 0 says where its store is
    ranks = [_fork(main, rank, pipes, timeout) for rank in range(processes)]
    for _, end in pipes:  # a rank that waits for rank 0 in vain reads its end
        os.close(end)
    codes = []
    for child in ranks:
        if codes and end_with_first:
            os.kill(child, signal.SIGKILL)
        codes.append(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    sys.exit(codes[0] if end_with_first else max(codes))


def _fork(
    main: Callable[[], None], rank: int, pipes: list[tuple[int, int]], timeout: timedelta
) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            size = len(pipes) + 1
            store = _serve(pipes, timeout) if rank == 0 else _reach(pipes, rank, timeout)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
            main()
            dist.barrier()  # the store ends with rank 0
            dist.destroy_process_group()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def _serve(pipes: list[tuple[int, int]], timeout: timedelta) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    for _, end in pipes:
        os.write(end, store.port.to_bytes(4, "big"))
    return store


def _reach(pipes: list[tuple[int, int]], rank: int, timeout: timedelta) -> dist.TCPStore:
    for _, end in pipes:
        os.close(end)
    port = os.read(pipes[rank - 1][0], 4)
    if not port:
        raise RuntimeError("rank 0 has ended before its store was there")
    return dist.TCPStore("127.0.0.1", int.from_bytes(port, "big"), None, False, timeout)
