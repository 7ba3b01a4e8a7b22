"""A small model, and something that happens in the middle of its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.conftest import squared


def interrupt() -> None:
    """A signal here and now: its handler runs before the next line."""
    signal.raise_signal(signal.SIGINT)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randn(6, 2)


def during(action: Callable[[], Any], at: int = 3) -> Any:
    """A loss function that does something in its n-th call."""
    calls = [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == at:
            action()
        return squared(outputs, targets)

    return loss


def run_in_thread(work: Callable[[], Any]) -> list[BaseException]:
    found: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, name="the other one")
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return found
