"""A process of several that fails in its third step; run by tests/faults/test_ranks.py.

`failing_ranks.py HOW PARALLEL`: the others must end soon, and say which failed and why.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flops import FlopsError, ForwardGradient, Group, LikelihoodRatio
from flops.engine import watch
from tests.support.parallel_cases import Words, batch, losses
from tests.support.ranks import start

LAST = 1  # rank that fails
STEPS = 40


def main(how: str, parallel: Any) -> None:
    watch.SILENT, watch.BEAT = 6.0, 1.0
    rank, step = dist.get_rank(), 0
    torch.manual_seed(0)
    model = Words().double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == LAST and step == 2:
            if how == "raises":
                raise ZeroDivisionError("of my own making")
            if how == "nan":
                return losses(outputs, targets) * torch.nan
            if how in ("stops", "dies"):
                os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
        return losses(outputs, targets)

    fg = ForwardGradient(model, loss, Group(model, LikelihoodRatio(), 4), parallel=parallel)
    try:
        for step in range(STEPS):
            words, targets, index = batch(step)
            own = slice(None) if parallel == "query" else slice(3 * rank, 3 * rank + 3)
            fg.estimate(words[own], targets[own], index=index[own])
    except (FlopsError, ZeroDivisionError) as error:
        sys.stdout.write(f"{rank}|{step}|{type(error).__name__}|{error}\n")
        sys.stdout.flush()
        time.sleep(20 if rank == LAST else 0)  # it need not end for the others to know
    finally:
        os._exit(3)  # a message is still pending


if __name__ == "__main__":
    start(partial(main, *sys.argv[1:]), 2, end_with_first=True, timeout=timedelta(minutes=10))
