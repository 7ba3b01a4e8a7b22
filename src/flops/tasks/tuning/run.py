"""One run of `flops tune`: a method, a step size, a seed; a folder with its journal and results."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flops.allocators.base import Learner
from flops.blackbox.drive import drive
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal
from flops.blackbox.tuner import Tuner
from flops.blackbox.tuning import Tuning, TuningProgress
from flops.errors import FlopsError
from flops.storage.files import atomic_write
from flops.tasks.tuning.methods import Recipe, stepper
from flops.tasks.tuning.names import FIXED
from flops.tasks.tuning.problem import Job

EARLIER = ("epochs", "patience")  # settings of journals that can be changed now


@dataclass(frozen=True)
class Limits:
    """How long a run is; each may change when it goes on.

    Attributes:
        epochs: Largest number of epochs.
        patience: Epochs without a better validation loss before it stops; 0 never stops.
        budget: Largest number of rows.
    """

    epochs: int
    patience: int
    budget: int | None


def tune(
    folder: Path,
    recipe: Recipe,
    limits: Limits,
    job: Job,
    *,
    notify: Callable[[TuningProgress], None] | None = None,
    answered: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Start or resume a run, and write its results.

    Args:
        folder: Folder of this run.
        recipe: Method, step size, seed.
        limits: How long it is.
        job: What is tuned.
        notify: Called after each epoch.
        answered: Called with the number of rows after each evaluation.
        stopped: Called after each round; True stops the run with an error.
        say: Called with a sentence about each problem that was handled.

    Returns:
        The result, as in result.json.
    """
    done = folder / "result.json"
    journal = Journal(
        folder / "journal.sqlite", {**asdict(recipe), **job.settings}, say, free=EARLIER
    )
    try:
        kept = _finished(done, say)
        if kept is not None and kept.get("limits") == asdict(limits):
            return kept
        steps = job.own or stepper(recipe, job.start, len(job.splits.train), job.parts, job.outputs)
        compares = isinstance(steps, Tuner) and isinstance(steps.allocator, Learner)

        def embed(logits: Tensor) -> None:
            assert isinstance(steps, Tuner)
            steps.embeddings = logits

        run = Tuning(
            steps,
            job.start,
            job.splits,
            0 if recipe.name in FIXED else limits.epochs,
            limits.patience,
            limits.budget,
            embed if compares and job.embeds else None,
            notify,
        )
        evaluator = Evaluator(
            job.objective,
            journal,
            limits.budget,
            job.part,
            job.concurrency,
            answered,
            job.executor,
            job.on_failure,
        )
        _drive(run, evaluator, journal, job, stopped)
        result = _result(recipe, run, journal) | {"limits": asdict(limits)}
        lines = "".join(json.dumps(asdict(entry)) + "\n" for entry in run.history)
        try:
            job.write(folder, run.best)
            atomic_write(folder / "metrics.jsonl", lines)
            # Last: it marks the run as finished.
            atomic_write(done, json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise FlopsError(
                f"{folder} cannot be written ({error}): free some space and start the same "
                "command again; all values are in the journal, and nothing is charged twice"
            ) from error
        return result
    finally:
        journal.close()


def _drive(
    run: Tuning, evaluator: Evaluator, journal: Journal, job: Job, stopped: Callable[[], bool]
) -> None:
    """Drive the run; requests, retries and seconds are counted over all its processes."""
    before, began = dict(job.counts()), time.perf_counter()

    def count() -> None:
        nonlocal before, began
        now, clock = dict(job.counts()), time.perf_counter()
        for name, value in now.items():
            if value > before.get(name, 0):
                journal.count(name, value - before.get(name, 0))
        journal.count("seconds", clock - began)
        before, began = now, clock
        if stopped() and not run.done:
            raise FlopsError("the run was stopped")

    drive(run, evaluator, count)


def _finished(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The result of a finished run, if it can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and found.keys() >= {"validation_loss", "queries"}:
            return found
        reason = "not a result"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    say(f"{path} cannot be read ({reason}); it is rebuilt from the journal")
    return None


def _result(recipe: Recipe, run: Tuning, journal: Journal) -> dict[str, Any]:
    best = min(run.history, key=lambda entry: entry.validation_loss)
    counted, paid = journal.counters(), journal.paid()
    return {
        "method": recipe.name,
        "step_size": recipe.step_size,
        "seed": recipe.seed,
        "accuracy": run.test_accuracy,
        "loss": run.test_loss,
        "validation_accuracy": best.validation_accuracy,
        "validation_loss": best.validation_loss,
        "start_loss": run.history[0].validation_loss,
        "last_loss": run.history[-1].validation_loss,
        "epochs": run.history[-1].epoch,
        "steps": run.history[-1].steps,
        "best_epoch": best.epoch,
        "stopped": run.stopped,
        "queries": paid["queries"],
        "failed": len(journal.failures()),
        "texts": paid.get("texts", 0),
        "images": paid.get("images", 0),
        "requests": int(counted.get("requests", 0)),
        "retries": int(counted.get("retries", 0)),
        "replays": paid.get("replays", 0),
        "seconds": counted.get("seconds", 0.0),
    }
