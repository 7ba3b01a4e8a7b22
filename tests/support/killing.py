"""Trains in real processes that are killed at given moments, for `test_resume`.

Run as ``python -m tests.support.killing CONFIG MOMENT ...``. The libraries are imported once; every
process that is killed is a fork of this one. A moment is ``lines N`` (that many lines of metrics
are there), ``lines N S`` (the same and S seconds more), ``writing N`` (a checkpoint is being
written, and N are there) or ``seconds S``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

# A fork inherits no threads: OpenMP would wait for those of this process for ever. So none are
# started here, and a child starts as many as it was meant to have.
THREADS = torch.get_num_threads()
torch.set_num_threads(1)

from flops.optional import require  # noqa: E402
from flops.tasks.classification.config import FinetuneConfig  # noqa: E402
from flops.training.loop import train  # noqa: E402
from flops.training.run_directory import is_run  # noqa: E402


def reached(moment: str, folder: Path) -> Callable[[], bool]:
    kind, number, *more = moment.split()
    began = time.monotonic()
    there: list[float] = []  # since when the lines are

    def lines() -> bool:
        metrics = folder / "metrics.jsonl"
        if not there and metrics.exists() and metrics.read_bytes().count(b"\n") >= int(number):
            there.append(time.monotonic())
        return bool(there) and time.monotonic() - there[0] >= sum(map(float, more))

    def writing() -> bool:
        names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").exists() else []
        busy = any(name.startswith("unfinished-step") for name in names)
        return busy and sum(name.startswith("step-") for name in names) >= int(number)

    def seconds() -> bool:
        return time.monotonic() - began > float(number)

    return {"lines": lines, "writing": writing, "seconds": seconds}[kind]


def process(config: FinetuneConfig) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        torch.set_num_threads(THREADS)
        try:
            train(config, resume=is_run(Path(str(config.output))))
            code = 0
        finally:
            os._exit(code)
    return child


def main(settings: str, moments: list[str]) -> None:
    config = FinetuneConfig(**json.loads(settings))
    folder = Path(str(config.output))
    for name in ("transformers.models.vit.modeling_vit", "sklearn.datasets", "matplotlib.figure"):
        require(name)
    kills = 0
    for moment in moments:
        child, now = process(config), reached(moment, folder)
        ended = status = 0
        while not now() and not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.0002)
        if ended:  # a busy machine may let a short moment pass
            if status:
                sys.exit(os.waitstatus_to_exitcode(status))
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    print(kills, flush=True)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process(config), 0)[1]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
