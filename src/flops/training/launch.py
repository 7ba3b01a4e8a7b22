"""Runs of several processes under `torchrun`: process group setup and broadcast of objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flops.engine.collectives import Collectives
from flops.engine.watch import WorkerError
from flops.passes.ranks import Ranks
from flops.training.launcher import launched

CONNECT = 60.0  # seconds to find the others: after a restart the first attempt may wait in vain


@contextmanager
def process_group(timeout: float, device: str) -> Iterator[Ranks]:
    """Ranks of a launched process, or of world size 1; an existing process group is kept.

    Args:
        timeout: Timeout of collectives, in seconds.
        device: Device of the model: "cpu", "cuda" or "auto".

    Raises:
        WorkerError: If the others cannot be reached.
    """
    if not launched() or not dist.is_available() or dist.is_initialized():
        yield Collectives.of("auto")
        return
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    first = min(timeout, CONNECT)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=first))
        if timeout > first:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"cannot initialise the process group: {error}") from error
    ranks = Collectives.of("auto")
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        dist.destroy_process_group()


def broadcast(ranks: Ranks, value: Any) -> Any:
    """Broadcast an object from rank 0, such as a checkpoint that only it reads."""
    if not isinstance(ranks, Collectives):
        return value
    parts = [value if ranks.rank == 0 else None]
    with ranks.guarded():
        dist.broadcast_object_list(parts, group=ranks.group, group_src=0)
    return parts[0]
