"""What `flops tune` tunes: prompts behind a service, a function, a program.

A problem opens workers, each of which runs one run at a time, and makes a `Job` of a recipe: where
to start, what to evaluate, and what to write at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from flops.blackbox.failures import OnFailure
from flops.blackbox.outputs import Outputs
from flops.blackbox.requests import AnyObjective
from flops.blackbox.tuning import SplitIndices, Stepper
from flops.tasks.tuning.methods import Recipe

W = TypeVar("W")


@dataclass(frozen=True, eq=False)
class Job:
    """One run.

    Attributes:
        start: Parameters to start from.
        splits: Points for training, validation and test.
        objective: Evaluates rows.
        settings: All that determines what is asked, besides the recipe; a journal with others is
            refused.
        write: Writes the tuned parameters into the folder of the run.
        parts: Shapes of the parameters by name.
        outputs: Outputs in the columns, for shaped noise.
        own: The optimizer, for a method that only this problem has.
        part: Rows per request.
        concurrency: Requests in flight.
        executor: Runs the requests.
        on_failure: What to do about rows that fail; None stops the run.
        counts: Counters of requests and retries so far.
        embeds: Whether "embed" rows return embeddings of the training points.
    """

    start: Tensor
    splits: SplitIndices
    objective: AnyObjective
    settings: Mapping[str, Any]
    write: Callable[[Path, Tensor], None]
    parts: dict[str, tuple[int, ...]] | None = None
    outputs: Outputs | None = None
    own: Stepper | None = None
    part: int = 128
    concurrency: int = 1
    executor: Executor | None = None
    on_failure: OnFailure | None = None
    counts: Callable[[], Mapping[str, int]] = field(default=dict)
    embeds: bool = False


class Problem(Protocol, Generic[W]):
    """What is tuned.

    Attributes:
        title: Of the table.
        metric: What it reports: "accuracy" in per cent, or "loss".
        note: Below the table.
    """

    title: str
    metric: Literal["accuracy", "loss"]
    note: str

    def open(self, stack: ExitStack, number: int) -> W:
        """Open a worker; ``stack`` closes it."""
        ...

    def job(self, recipe: Recipe, worker: W) -> Job:
        """The run of a recipe."""
        ...
