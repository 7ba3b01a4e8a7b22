"""What a training run needs of its task: a model, data, an engine, a measure of success.

`flops.tasks.classification` trains image classifiers, `flops.tasks.alignment` aligns two models;
the loop, the run directory, checkpoints, progress and resuming are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flops.engine.collectives import Collectives
from flops.engine.forward_gradient import ForwardGradient
from flops.training.config import RunConfig
from flops.training.progress import Evaluation


class TaskSplit(Protocol):
    """A split: neither the number of points nor what a row holds ever changes."""

    @property
    def labels(self) -> Tensor:
        """Classes of all points, (N,), int64; all 0 where there are none."""

    def __len__(self) -> int:
        """Number of points."""


class TaskData(Protocol):
    """Three splits, and what is known about them."""

    @property
    def train(self) -> TaskSplit: ...  # noqa: D102

    @property
    def validation(self) -> TaskSplit: ...  # noqa: D102

    @property
    def test(self) -> TaskSplit: ...  # noqa: D102

    @property
    def classes(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102


class Task(Protocol):
    """A model with its data, on a device."""

    @property
    def model(self) -> nn.Module:
        """What is trained, in evaluation mode; frozen parameters are in no checkpoint."""

    @property
    def data(self) -> TaskData:
        """Its data."""

    @property
    def title(self) -> str:
        """What is trained on what, in a line."""

    def engine(self) -> ForwardGradient:
        """The engine of the configured method."""

    def batch(self, rows: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of some training points, on the device."""

    def limit_gradients(self) -> None:
        """Change gradients before the optimizer sees them, if configured."""

    def measure(self, split: Any, ranks: Collectives) -> tuple[float, float]:
        """Accuracy and mean loss on a split; the processes of a ranks share the work."""

    def contents(self) -> Iterable[bytes]:
        """What tells the data from others: a run that goes on must find them unchanged."""

    def pixels(self, rows: Tensor) -> Tensor:
        """Images of some training points in [0, 1], (n, channels, side, side), to be looked at."""

    def save(self, folder: Path, evaluations: list[Evaluation]) -> None:
        """Write what was trained, and what else the task has to show, into the run directory."""


@singledispatch
def open_task(config: RunConfig, device: torch.device) -> Task:
    """Load the model and the data of a configuration.

    A task registers itself for its configuration: `open_task.register(MyConfig)(MyTask)`.

    Raises:
        FlopsError: If the two do not fit together, or cannot be read.
    """
    raise TypeError(f"no task is registered for a {type(config).__name__}")
