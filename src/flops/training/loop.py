"""The one training loop: every method is a configuration of it.

    step -> line in metrics.jsonl -> evaluation, if a mark is reached -> checkpoint, if due

The order of points is a function of (seed, epoch), and evaluations depend on the state only. So a
run resumed from a checkpoint gives the results of an uninterrupted one: bit for bit on the same
machine with the same versions and number of threads, else up to rounding.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

from flops.passes.ranks import Ranks
from flops.report.allocation import plot_allocation
from flops.report.counts import write_counts
from flops.report.curves import plot_curves
from flops.report.names import method_name
from flops.storage.disk import writing
from flops.storage.files import atomic_write
from flops.training.config import ConfigError, RunConfig
from flops.training.launch import broadcast, process_group
from flops.training.launcher import restarted
from flops.training.progress import Evaluation, Result
from flops.training.run_directory import RunDirectory, check_free, is_run
from flops.training.signals import GracefulStop
from flops.training.trainer import Trainer


class Display(Protocol):
    """Observer of a run; see `flops.training.console`."""

    def start(self, trainer: Trainer, folder: Path | None) -> None:
        """Training starts or resumes."""

    def step(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """A step was taken; ``line`` is its line in the metrics."""

    def evaluation(self, trainer: Trainer, found: Evaluation) -> None:
        """The validation split was evaluated."""

    def close(self) -> None:
        """Training has ended or was interrupted."""


class NullDisplay:
    """Shows nothing."""

    def start(self, trainer: Trainer, folder: Path | None) -> None:
        """Nothing."""

    def step(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Nothing."""

    def evaluation(self, trainer: Trainer, found: Evaluation) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    checkpoint: str = "last",
    display: Display | None = None,
) -> Result:
    """Train until `epochs`, `budget` or `steps` is reached, and write the run directory.

    Args:
        config: Options of the run. Without `output` nothing is written.
        resume: Continue the run in `output`, from its last checkpoint or from the beginning if
            there is none yet. Workers that torchrun has restarted (`--max-restarts`) always do.
        checkpoint: "last", the last intact one, or "previous", the one before it.
        display: Observer of the run.

    Under torchrun every process takes its part of each batch, or of its queries (`parallel`); only
    rank 0 writes.

    Returns:
        All evaluations and the cost of the run.

    Raises:
        FlopsError: If folder, data, model and settings do not fit, a loss is not finite, or another
            process of the run died.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, with a checkpoint of the current step; a second
            signal stops at once.
    """
    with process_group(config.timeout, config.device) as ranks:
        resume = resume or (
            restarted() and config.output is not None and is_run(Path(config.output))
        )
        if ranks.rank:  # rank 0 has the folder and the display
            config, display = config.replace(output=None), None
        return _train(config, resume, checkpoint, display or NullDisplay(), ranks)


def _train(
    config: RunConfig, resume: bool, checkpoint: str, shown: Display, ranks: Ranks
) -> Result:
    path = None if config.output is None else Path(config.output)
    folder, restored = None, None
    if path is not None and resume:
        folder, restored = RunDirectory.reopen(path, checkpoint)
    elif path is not None:
        check_free(path)
    elif resume and ranks.rank == 0:
        raise ConfigError("to resume, set `output` to the run directory")
    try:
        trainer = Trainer(config)
        if (restored := broadcast(ranks, restored)) is not None:
            trainer.load_state_dict(*restored)
        if folder is not None and folder.changes_length(config):
            _check_extension(trainer)
            folder.record_length(config)
        if path is not None and folder is None:  # only after model, data and settings were checked
            folder = RunDirectory.create(path, config)
        shown.start(trainer, path)
        with GracefulStop(folder is not None or ranks.rank > 0) as stopping:
            _loop(trainer, folder, shown, stopping)
        result = _result(trainer)
        if folder is not None:
            advice = "free some space and resume the run, which is complete, to write them"
            with writing(folder.path, advice):
                _write_results(trainer, result, folder.path)
    finally:
        shown.close()
        if folder is not None:
            folder.close()
    return result


def _check_extension(trainer: Trainer) -> None:
    """Raise if a resumed run with another length would not go on, or not as one of this length."""
    config, progress = trainer.config, trainer.progress
    if config.schedule == "cosine" and progress.step:
        raise ConfigError(
            "a run with a cosine schedule cannot change its length: the learning rates of its "
            "steps depend on it; start a new run"
        )
    begun = progress.epoch + (progress.position > 0)
    for name, now in (("epochs", begun), ("steps", progress.step), ("budget", progress.spent)):
        wanted = getattr(config, name)
        if wanted is not None and wanted < now:
            raise ConfigError(
                f"the run has already reached {now:,.7g} of {name}, and {wanted:,.7g} would not "
                f"extend it; give more, or --{name} None and another limit"
            )
    if trainer.finished():
        raise ConfigError(
            f"the run ended at {', '.join(sorted(set(trainer.stops) & progress.reached))}, which "
            "still limits it; raise this limit (--epochs, --steps, --budget) too, or set it to None"
        )


def _result(trainer: Trainer) -> Result:
    progress = trainer.progress
    return Result(
        tuple(progress.evaluations),
        progress.step,
        progress.queries,
        progress.spent,
        dict(progress.parts),
        progress.seconds,
        peak_memory(),
        trainer.config.output,
    )


def _loop(
    trainer: Trainer, folder: RunDirectory | None, display: Display, stopping: GracefulStop
) -> None:
    clock = _Clock(trainer.config, trainer.progress.step)
    while True:
        if marks := trainer.due():
            found = trainer.evaluate(marks)
            if folder is not None:
                folder.write({"kind": "evaluation", **found.to_dict()})
            display.evaluation(trainer, found)
        finished = trainer.finished()
        if folder is not None and clock.due(trainer.progress.step, finished):
            weights, state = trainer.weights(), trainer.state_dict()
            folder.save(trainer.progress.step, weights, state, last=finished)
        if finished:
            return
        line = trainer.step()
        if folder is not None:
            folder.write(line)
        display.step(trainer, line)
        if trainer.ranks.any(stopping.requested):  # all ranks stop at the same step
            if folder is not None:
                folder.save(trainer.progress.step, trainer.weights(), trainer.state_dict())
            raise KeyboardInterrupt


def _write_results(trainer: Trainer, result: Result, folder: Path) -> None:
    """Write the model and the plots; idempotent.

    Args:
        trainer: The finished run.
        result: Its result.
        folder: The run directory.
    """
    task, data, counts = trainer.task, trainer.data, folder / "counts.safetensors"
    task.save(folder, trainer.progress.evaluations)
    atomic_write(folder / "result.json", json.dumps(result.to_dict(), indent=2) + "\n")
    labels, classes = data.train.labels, data.classes
    write_counts(counts, trainer.latest, labels, classes, task.pixels, task.excerpts)
    if not trainer.config.plots:
        return
    try:
        plot_curves(
            folder / "metrics.jsonl",
            folder / "curves.png",
            title=f"{data.name}: {method_name(trainer.config.method)}",
            chance=1 / len(classes) if task.guesses_class and len(classes) > 1 else None,
        )
        if trainer.progress.queries:  # none with backpropagation
            plot_allocation(counts, folder / "allocation.png")
    except ImportError as error:
        warnings.warn(f"no plots were drawn: {error}", stacklevel=3)


def peak_memory() -> int:
    """Peak memory of the process in bytes; 0 if unknown.

    Linux's `ru_maxrss` starts at the memory of the parent process, so every worker of a comparison
    would report that of its parent; VmHWM is of the process alone.
    """
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            found = [int(line.split()[1]) for line in status if line.startswith("VmHWM:")]
        if found:
            return found[0] * 1024
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Clock:
    """Schedule of checkpoints; never two at the same step."""

    def __init__(self, config: RunConfig, step: int) -> None:
        self._steps, self._seconds = config.checkpoint_steps, config.checkpoint_seconds
        self._step, self._time = step, time.monotonic()

    def due(self, step: int, finished: bool) -> bool:
        now = time.monotonic()
        by_steps = self._steps is not None and step % self._steps == 0
        by_time = self._seconds is not None and now - self._time >= self._seconds
        if step == self._step or not (finished or by_steps or by_time):
            return False
        self._step, self._time = step, now
        return True
