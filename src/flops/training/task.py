"""The interface of a task to the training loop: a model, data, an engine, a metric.

`flops.tasks.classification` trains image classifiers, `flops.tasks.text` language models, and
`flops.tasks.alignment` aligns two models; loop, run directory, checkpoints, progress and resuming
are shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flops.engine.forward_gradient import ForwardGradient
from flops.passes.ranks import Ranks
from flops.training.config import RunConfig
from flops.training.progress import Evaluation

S = TypeVar("S", bound="TaskSplit")


class TaskSplit(Protocol):
    """A split, fixed in number and order of points."""

    @property
    def labels(self) -> Tensor:
        """Classes of all points, (N,), int64; 0 without classes."""

    def __len__(self) -> int:
        """Number of points."""


class TaskData(Protocol):
    """Three splits and their metadata."""

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


@dataclass(frozen=True)
class Splits(Generic[S]):
    """Three splits of one kind, and their metadata."""

    train: S
    validation: S
    test: S
    classes: tuple[str, ...]
    name: str
    notes: tuple[str, ...] = ()


class Task(Protocol):
    """A model with its data, on a device."""

    @property
    def model(self) -> nn.Module:
        """The model, in evaluation mode; frozen parameters are not in checkpoints."""

    @property
    def data(self) -> TaskData:
        """Its data."""

    @property
    def title(self) -> str:
        """One line about model and data."""

    @property
    def guesses_class(self) -> bool:
        """Whether the accuracy of guessing is one over the number of classes."""

    def engine(self) -> ForwardGradient:
        """The engine of the configured method."""

    def batch(self, rows: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of some training points, on the device."""

    def limit_gradients(self) -> None:
        """Clip gradients before the optimizer step, if configured."""

    def measure(self, split: Any, ranks: Ranks) -> tuple[float, float]:
        """Accuracy and mean loss on a split; ranks share the work."""

    def contents(self) -> Iterable[bytes]:
        """Bytes that identify the data: a resumed run must find them unchanged."""

    def pixels(self, rows: Tensor) -> Tensor | None:
        """Images of some training points in [0, 1], (n, channels, side, side), for display.

        None for texts.
        """

    def excerpts(self, rows: Tensor) -> list[str] | None:
        """Texts of some training points, for display; None for images."""

    def save(self, folder: Path, evaluations: list[Evaluation]) -> None:
        """Write the trained model, and reports of the task, into the run directory."""


@singledispatch
def open_task(config: RunConfig, device: torch.device) -> Task:
    """Load the model and the data of a configuration.

    Tasks are registered by the type of their configuration: `open_task.register(MyConfig)(MyTask)`.

    Raises:
        FlopsError: If they cannot be read or do not fit together.
    """
    raise TypeError(f"no task is registered for a {type(config).__name__}")
